//! Random histories, the same on every backend.

use super::Fixture;
use crate::conformance::model;

/// Every outcome of a random history is the one that the model predicts.
pub async fn random_histories_match_the_model<F: Fixture>(fixture: &F) {
    for seed in 1..=8 {
        model::check_history(fixture, seed, 60).await;
    }
}
