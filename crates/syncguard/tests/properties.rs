//! Properties of the basic types, over thousands of random inputs.

use proptest::prelude::*;
use std::time::Duration;
use syncguard::backend::{KeySpace, MAX_KEY_LENGTH_BYTES, hash_key, is_live};
use syncguard::{Backoff, Fence, Jitter, Key, LockId, RetryPolicy, Timestamp, Ttl};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 10_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_key_is_its_own_normal_form(text in ".{0,200}") {
        if let Ok(key) = Key::new(&text) {
            prop_assert!((1..=MAX_KEY_LENGTH_BYTES).contains(&key.as_str().len()));
            let again = Key::new(key.as_str()).expect("a normal form is valid");
            prop_assert_eq!(&again, &key);
            prop_assert_eq!(key.hash_id(), hash_key(&text));
            let shown = format!("{key:?}");
            prop_assert!(key.as_str().len() < 4 || !shown.contains(key.as_str()));
        } else {
            prop_assert!(text.is_empty() || text.contains('\0') || text.len() > 150);
        }
    }

    #[test]
    fn storage_keys_fit_and_distinguish_keys(
        prefix in "[a-z:{}]{0,40}",
        one in "\\PC{1,60}",
        two in "\\PC{1,60}",
        limit in 100_usize..400,
    ) {
        let (Ok(one), Ok(two)) = (Key::new(one), Key::new(two)) else { return Ok(()) };
        let space = KeySpace::new(prefix, limit, 26).expect("short enough");
        let lock_one = space.lock_key(&one).expect("fits");
        let lock_two = space.lock_key(&two).expect("fits");
        prop_assert!(lock_one.len() + 26 <= limit);
        prop_assert_eq!(lock_one == lock_two, one == two);
        let fences = [&lock_one, &lock_two].map(|lock| space.fence_key(lock).expect("fits"));
        prop_assert_eq!(fences[0] == fences[1], one == two);
        prop_assert!(!fences.contains(&lock_one));
    }

    #[test]
    fn fences_order_as_numbers_and_as_text(
        one in 0_u64..999_999_999_999_999,
        two in 0_u64..999_999_999_999_999,
    ) {
        let (one, two) = (Fence::new(one).expect("15 digits"), Fence::new(two).expect("15 digits"));
        prop_assert_eq!(one.cmp(&two), one.to_string().cmp(&two.to_string()));
        prop_assert_eq!(one.to_string().parse::<Fence>().expect("15 digits"), one);
    }

    #[test]
    fn a_parsed_fence_or_lock_id_prints_its_text(text in "\\PC{0,30}") {
        if let Ok(fence) = text.parse::<Fence>() {
            prop_assert_eq!(fence.to_string(), text.clone());
        }
        if let Ok(lock_id) = LockId::parse(&text) {
            prop_assert_eq!(lock_id.expose(), text);
        }
    }

    #[test]
    fn a_lock_lives_for_its_ttl_and_the_tolerance(
        now in 0_u64..4_000_000_000_000,
        ttl in 1_u64..86_400_000,
        later in 0_u64..100_000_000,
    ) {
        let ttl_value = Ttl::new(Duration::from_millis(ttl)).expect("valid");
        let expires_at = Timestamp::from_millis(now).expiry(ttl_value);
        let then = Timestamp::from_millis(now + later);
        prop_assert_eq!(is_live(expires_at, then), later < ttl + 1000);
        prop_assert_eq!(expires_at.dead_in(then).is_zero(), !is_live(expires_at, then));
    }

    #[test]
    fn delays_stay_within_their_jitter(
        retry in 1_u32..40,
        delay_ms in 0_u64..10_000,
        random in 0.0_f64..1.0,
        equal: bool,
    ) {
        let jitter = if equal { Jitter::Equal } else { Jitter::Full };
        let policy = RetryPolicy::default()
            .delay(Duration::from_millis(delay_ms))
            .jitter(jitter)
            .backoff(Backoff::Exponential);
        let whole = policy.jitter(Jitter::None).delay_for(retry, random);
        let delay = policy.delay_for(retry, random);
        prop_assert!(delay <= whole);
        prop_assert!(!equal || delay >= whole / 2);
    }
}
