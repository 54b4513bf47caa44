"""Many ranks: experts split over processes, requests owned by one each, and the agreement that keeps their steps alike."""
