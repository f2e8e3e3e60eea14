//! The test kit for backend authors: one fixture and one line create one test per rule.
//!
//! Write a [`Fixture`] for your store, then, in an integration test:
//!
//! ```
//! use syncguard::conformance::MemoryFixture;
//!
//! syncguard::conformance_tests!(MemoryFixture::new());
//! # fn main() {}
//! ```
//!
//! The expression may `.await`; it is evaluated once per test, inside a runtime. Every case uses
//! its own keys, so all of them can share one store and run in parallel.
//!
//! New cases may appear in minor releases; names are stable.

pub mod cases;
mod crowded;
mod fixture;
mod log;
mod memory;
pub mod model;
mod yielding;

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Builder;

pub use crowded::Crowded;
pub use fixture::{Fixture, RawLock, Wrapped};
pub use memory::MemoryFixture;
pub use yielding::Yielding;

/// Runs one case in its own runtime. A case that hangs fails.
#[doc(hidden)]
pub fn run(case: impl Future<Output = ()>) {
    const LONGEST: Duration = Duration::from_mins(2);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let finished = runtime
        .expect("a runtime can be started")
        .block_on(async { tokio::time::timeout(LONGEST, case).await });
    assert!(finished.is_ok(), "the case did not end within {LONGEST:?}");
}

/// Creates one test per rule of the contract, for the backend of a [`Fixture`].
///
/// See [`conformance`](crate::conformance).
#[macro_export]
macro_rules! conformance_tests {
    ($fixture:expr) => {
        $crate::conformance_tests!(@each tests $fixture);
    };
    (@each $what:ident $($argument:tt)*) => {
        $crate::conformance_tests!(@$what ($($argument)*)
            lifecycle::an_acquired_lock_is_held_until_it_is_released
            lifecycle::the_expiry_is_now_plus_ttl_by_the_time_authority
            lifecycle::a_release_leaves_nothing_but_the_fence_counter
            lifecycle::distinct_keys_are_distinct_locks
            lifecycle::capabilities_match_the_type_and_every_handle
            contention::a_held_lock_is_contended_and_only_read
            contention::contention_reports_when_the_lock_is_dead
            contention::parallel_acquires_have_one_winner
            contention::sixteen_tasks_lose_no_update
            ownership::another_id_can_neither_release_nor_extend
            ownership::only_one_of_many_releases_succeeds
            ownership::an_old_id_cannot_touch_the_next_holder
            ownership::a_wrong_hint_changes_no_answer
            expiry::a_lock_is_live_up_to_the_edge
            expiry::a_lock_is_dead_from_the_edge_on
            expiry::a_dead_lock_is_taken_over
            expiry::an_extend_replaces_the_ttl
            expiry::a_shorter_extend_ends_the_lock_earlier
            expiry::an_extend_keeps_fence_and_acquisition_time
            expiry::a_dead_lock_is_never_revived
            expiry::a_released_lock_is_never_revived
            expiry::expired_and_not_found_are_distinguished
            fencing::the_first_fence_is_one_and_fences_grow
            fencing::fences_grow_across_expiry
            fencing::fences_survive_a_restart
            fencing::the_largest_fence_is_granted_and_no_larger_one
            fencing::fences_near_the_end_log_a_warning_without_the_key
            fencing::fences_from_the_clock_grow_with_every_grant
            fencing::fences_from_the_clock_survive_the_loss_of_their_counter
            fencing::a_clock_that_is_behind_its_counter_never_lowers_a_fence
            fencing::fences_from_the_clock_end_with_the_largest_one
            lookup::lookups_by_key_and_by_id_agree
            lookup::free_and_dead_locks_are_not_found
            lookup::lookup_results_are_sanitized
            lookup::a_lock_names_its_holder_until_the_next_one
            lookup::reads_change_nothing
            admin::live_locks_are_listed_and_nothing_else
            admin::a_break_deletes_only_the_lock_that_was_shown
            admin::a_broken_lock_is_lost_at_once_with_who_and_why
            keys::odd_keys_are_locks_like_any_other
            keys::long_keys_are_locks_like_any_other
            keys::both_unicode_forms_are_one_lock
            replay::the_same_request_gets_the_same_lease
            replay::a_request_whose_lease_is_over_is_already_used
            replay::a_replay_gets_the_lease_as_it_is_now
            replay::a_replayed_request_is_released_once
            replay::an_undo_frees_the_lock
            replay::an_undo_after_a_replay_frees_the_lock
            replay::nothing_is_acquired_after_a_final_undo
            cleanup::nothing_is_cleaned_up_by_default
            cleanup::an_old_record_is_cleaned_up_and_its_counter_is_kept
            cleanup::a_recent_record_is_not_cleaned_up
            cancellation::an_acquire_dropped_anywhere_leaves_no_lock
            cancellation::a_wait_dropped_anywhere_leaves_no_lock
            cancellation::a_release_dropped_anywhere_still_releases
            cancellation::an_extend_dropped_anywhere_does_no_harm
            cancellation::a_read_dropped_anywhere_does_no_harm
            cancellation::a_token_ends_every_operation_before_it_begins
            cancellation::a_token_ends_every_operation_in_progress
            notifications::a_release_notifies_subscribers
            notifications::a_notification_carries_the_age_of_the_holder
            notifications::a_waiter_gets_the_lock_without_polling
            notifications::a_crashed_holder_is_taken_over_when_its_lock_is_dead
            notifications::waiters_are_counted_and_watchers_are_not
            errors::a_corrupt_record_is_an_internal_error_and_stays
            errors::an_error_names_backend_operation_and_key
            lock_all::several_locks_are_taken_all_or_none
            lock_all::overlapping_sets_do_not_deadlock
            lock_all::losing_one_lock_is_losing_all
            lock_all::a_set_dropped_anywhere_leaves_no_lock
            election::at_most_one_leads_and_terms_grow
            election::a_leader_that_resigns_is_followed_at_once
            election::an_observer_sees_every_change
            election::a_lost_lead_stops_the_work
            election::a_campaign_dropped_anywhere_leaves_no_leader
            semaphore::any_of_several_locks_is_acquired_and_no_other
            semaphore::never_more_permits_than_agreed
            semaphore::a_permit_is_handed_over_without_polling
            semaphore::several_permits_are_taken_all_or_none
            semaphore::a_permit_dropped_anywhere_is_given_back
            history::random_histories_match_the_model
        );
    };
    (@tests ($fixture:expr) $($module:ident :: $case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run(async {
                    let fixture = $fixture;
                    $crate::conformance::cases::$module::$case(&fixture).await;
                });
            }
        )*
    };
    (@list ($fixture:ty) $($module:ident :: $case:ident)*) => {
        [$(
            $crate::conformance::Case::<$fixture> {
                name: stringify!($case),
                run: |fixture| ::std::boxed::Box::pin(
                    $crate::conformance::cases::$module::$case(fixture)
                ),
            }
        ),*]
    };
}

/// A case as a value, for tests of the kit itself. Created by
/// `conformance_tests!(@each list FixtureType)`.
#[doc(hidden)]
#[expect(missing_debug_implementations, reason = "not part of the interface")]
pub struct Case<F> {
    /// The name of the rule.
    pub name: &'static str,
    /// Runs it.
    pub run: for<'a> fn(&'a F) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>>,
}
