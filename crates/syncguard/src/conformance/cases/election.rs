//! Elections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::cancellation::{MOST_POLLS, poll_then_drop};
use super::{Fixture, LONG, fresh_key};
use crate::common::key::Key;
use crate::contract::LockBackend;
use crate::contract::outcome::ReleaseOutcome;
use crate::contract::request::ReleaseRequest;
use crate::lock::clock::LocalClock;
use crate::lock::locker::Locker;
use crate::lock::options::LockOptions;
use crate::primitives::{Observation, Role};

const SOON: Duration = Duration::from_secs(10);

fn locker<B: LockBackend>(backend: B) -> Locker<B> {
    let builder = Locker::builder(backend).clock(LocalClock::Tokio);
    builder.options(LockOptions::default().ttl(LONG)).build().expect("inside a runtime")
}

/// Several candidates lead in turn: never two at once, and every term is larger than the one
/// before.
pub async fn at_most_one_leads_and_terms_grow<F: Fixture>(fixture: &F) {
    const CANDIDATES: usize = 4;
    const TERMS: u32 = 12;
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("election");
    let (leads, last) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let terms = Arc::new(AtomicU32::new(0));
    let candidates: Vec<_> = (0..CANDIDATES).map(|_| locker(Arc::clone(&backend))).collect();
    let tasks: Vec<_> = candidates
        .iter()
        .map(|candidate| {
            let election = candidate.election(&name).expect("valid");
            let (leads, last, terms) = (Arc::clone(&leads), Arc::clone(&last), Arc::clone(&terms));
            tokio::spawn(async move {
                let mut led = 0;
                while terms.load(Ordering::SeqCst) < TERMS {
                    let leadership = election.campaign().await.expect("works");
                    assert!(!leads.swap(true, Ordering::SeqCst), "two lead at once");
                    let term = leadership.term().get();
                    assert!(last.swap(term, Ordering::SeqCst) < term, "terms must grow");
                    assert_eq!(election.role(), Role::Leading);
                    tokio::task::yield_now().await;
                    terms.fetch_add(1, Ordering::SeqCst);
                    leads.store(false, Ordering::SeqCst);
                    let resigned = leadership.resign().await.expect("works");
                    assert_eq!(resigned, ReleaseOutcome::Released);
                    led += 1;
                }
                led
            })
        })
        .collect();
    for task in tasks {
        // A candidate that resigns lets the others go first, so none leads all the time.
        assert!(task.await.expect("no panic") < TERMS, "the others never led");
    }
    for candidate in candidates {
        candidate.shutdown().await.expect("nothing is left to do");
    }
}

/// A follower leads as soon as the leader shuts down, although it would poll only much later.
pub async fn a_leader_that_resigns_is_followed_at_once<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("hand-over");
    let (first, second) = (locker(Arc::clone(&backend)), locker(backend));
    let serving = {
        let election = first.election(&name).expect("valid");
        tokio::spawn(async move { election.run(|_lead| std::future::pending()).await })
    };
    let follower = second.election(&name).expect("valid");
    let mut observer = follower.observe();
    while !matches!(observer.next().await, Observation::Led(_)) {}
    assert_eq!(follower.role(), Role::Unknown);
    let campaign = {
        let follower = follower.clone();
        tokio::spawn(async move { follower.campaign().await })
    };
    let follows = async {
        while follower.role() != Role::Following {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, follows).await.expect("it follows");
    first.shutdown().await.expect("it hands over");
    serving.await.expect("no panic").expect("it ends without an error");
    let leadership = tokio::time::timeout(SOON, campaign).await.expect("handed over");
    let leadership = leadership.expect("no panic").expect("leads");
    assert_eq!(leadership.term().get(), 2);
    leadership.resign().await.expect("works");
    second.shutdown().await.expect("nothing is left to do");
}

/// An observer sees who leads in which term, and that no process does.
pub async fn an_observer_sees_every_change<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let name = fresh_key("observer");
    let (candidate, other) = (locker(Arc::clone(&backend)), locker(backend));
    let election = candidate.election(&name).expect("valid");
    let mut observer = other.election(&name).expect("valid").observe();
    assert_eq!(observer.next().await, Observation::Vacant);
    for term in 1..=3 {
        let leadership = election.campaign().await.expect("free");
        let seen = tokio::time::timeout(SOON, observer.next()).await.expect("noticed");
        let Observation::Led(leader) = seen else { panic!("{seen:?}") };
        assert_eq!(leader.term, Some(leadership.term()));
        assert_eq!(leadership.term().get(), term);
        // Another case may have set up the store since, which then has holders.
        assert!(leader.holder.is_some() || !fixture.stores_holders());
        leadership.resign().await.expect("works");
        let seen = tokio::time::timeout(SOON, observer.next()).await.expect("noticed");
        assert_eq!(seen, Observation::Vacant);
    }
    candidate.shutdown().await.expect("nothing is left to do");
}

/// When the lead is taken away, the work is dropped, and the candidate leads again in a later term.
pub async fn a_lost_lead_stops_the_work<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    let locker = locker(Arc::clone(&backend));
    let election = locker.election(fresh_key("lose-lead")).expect("valid");
    let (seen, mut terms) = tokio::sync::mpsc::unbounded_channel();
    let serving = {
        let election = election.clone();
        tokio::spawn(async move {
            election
                .run(|lead| {
                    let seen = seen.clone();
                    async move {
                        seen.send((lead.clone(), lead.fence().get()))
                            .expect("the case waits for it");
                        std::future::pending::<()>().await;
                    }
                })
                .await
        })
    };
    let (lead, term) = terms.recv().await.expect("leads");
    backend.release(&ReleaseRequest::new(lead.lock_id())).await.expect("works");
    // Notices the loss now, not at the next renewal.
    drop(lead.extend(LONG).await.expect("works"));
    let next = tokio::time::timeout(SOON, terms.recv()).await.expect("leads again");
    assert!(next.expect("leads").1 > term);
    locker.shutdown().await.expect("it hands over");
    serving.await.expect("no panic").expect("it ends without an error");
    assert!(!backend.is_locked(election.key()).await.expect("works"));
}

/// Wherever a campaign is dropped, no process leads afterwards.
pub async fn a_campaign_dropped_anywhere_leaves_no_leader<F: Fixture>(fixture: &F) {
    let backend = Arc::new(fixture.backend().await);
    for polls in 0..MOST_POLLS {
        let name: Key = fresh_key("drop-campaign");
        let locker = locker(Arc::clone(&backend));
        let election = locker.election(&name).expect("valid");
        let ended = poll_then_drop(election.campaign(), polls).await;
        assert_eq!(election.role(), Role::Unknown);
        locker.shutdown().await.expect("the background work ends");
        assert!(!backend.is_locked(election.key()).await.expect("works"), "after {polls} polls");
        if ended {
            return;
        }
    }
    panic!("campaign() did not end within {MOST_POLLS} polls");
}
