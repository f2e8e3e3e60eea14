//! The engine under many schedules: shuttle decides at every use of a shared mutex, and at every
//! await, which task continues ([ADR 051](../../../../../docs/adr/051-below-the-store.md)).
//!
//! Time stands still unless a scenario's clock moves it. A waiter that misses its wake-up is then
//! not saved by a timer: shuttle reports a deadlock.

#![cfg(test)]

mod remote;
mod scenarios;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use shuttle::future::yield_now;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};
use tokio::runtime::Runtime;

/// The schedules of each scenario in CI. `SYNCGUARD_SCHEDULES` and `SYNCGUARD_SEED` change how many
/// there are and which.
const SCHEDULES: usize = 20_000;

/// Returns whether the caller runs inside a schedule.
pub(super) fn is_running() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

/// Starts a background task of the engine. A schedule ends only when all of them have.
pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    // Dropping the handle would let the schedule end before the task.
    std::mem::forget(shuttle::future::spawn(task));
}

/// Moves the time of a schedule.
#[derive(Clone)]
pub(crate) struct Time(Arc<Runtime>);

impl Time {
    /// Lets `step` pass. Every timer that is due then wakes its task.
    fn pass(&self, step: Duration) {
        self.0.block_on(tokio::time::advance(step));
    }

    /// Lets `step` pass `times` times, at moments that the schedule chooses.
    async fn pass_often(&self, times: u32, step: Duration) {
        for _ in 0..times {
            yield_now().await;
            self.pass(step);
        }
    }
}

/// Polls `work` until it completes or a few polls have passed, then drops it.
pub(crate) async fn dropped_midway<T>(work: impl Future<Output = T>) -> Option<T> {
    let polls = thread_rng().gen_range(0..6);
    tokio::select! {
        biased;
        value = work => Some(value),
        () = async { for _ in 0..polls { yield_now().await } } => None,
    }
}

/// Runs a scenario under random schedules, and under schedules with few preemptions.
pub(crate) fn explore<Scenario, Run>(name: &str, scenario: Scenario)
where
    Scenario: Fn(Time) -> Run + Copy + Send + Sync + 'static,
    Run: Future<Output = ()> + 'static,
{
    /// More decisions than any schedule that ends.
    const STEPS: usize = 100_000;
    let set = |variable: &str| std::env::var(variable).ok();
    let count = set("SYNCGUARD_SCHEDULES").map_or(SCHEDULES, |it| it.parse().expect("a number"));
    let seed = set("SYNCGUARD_SEED").map_or(1, |it| it.parse().expect("a number"));
    // It runs no tasks: it is there for its clock and its timers.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true);
    let time = Time(Arc::new(runtime.build().expect("a runtime")));
    let _inside = time.0.enter();
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.max_steps = MaxSteps::FailAfter(STEPS);
    config.silence_warnings = true;
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let time = time.clone();
        let test = move || shuttle::future::block_on(scenario(time.clone()));
        Runner::new(scheduler, config.clone()).run(test)
    };
    let explored = run(Box::new(RandomScheduler::new_from_seed(seed, count / 2)))
        + run(Box::new(PctScheduler::new_from_seed(seed, 3, count - count / 2)));
    test_support::figure(&format!("schedules: {name}"), explored);
}
