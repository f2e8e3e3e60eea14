//! A lock as it is stored: JSON, with its fields in any order and unknown fields allowed.

use serde::Deserialize;

use super::error;
use crate::common::error::Result;
use crate::common::fence::Fence;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::request::AcquireRequest;
use crate::contract::stored_lock::StoredLock;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    lock_id: String,
    // Lua writes large numbers in exponent form, so these are read as floats.
    expires_at_ms: f64,
    acquired_at_ms: f64,
    key: String,
    fence: String,
    /// Any JSON, because other programs may use the field for something else.
    #[serde(default)]
    holder: serde_json::Value,
}

/// Parses a record. An invalid one is an error, never a panic.
pub(super) fn parse(json: &[u8]) -> Result<StoredLock> {
    let foreign = error::foreign;
    let record: Record = serde_json::from_slice(json).map_err(|_cause| foreign())?;
    Ok(StoredLock::new(
        Key::new(record.key).map_err(|_cause| foreign())?,
        LockId::parse(&record.lock_id).map_err(|_cause| foreign())?,
        record.fence.parse::<Fence>().map_err(|_cause| foreign())?,
    )
    .acquired_at(millis(record.acquired_at_ms).ok_or_else(foreign)?)
    .expires_at(millis(record.expires_at_ms).ok_or_else(foreign)?)
    .held_by(record.holder.as_str().and_then(HolderInfo::parse)))
}

/// Returns the lock id in a record, if it has one.
pub(super) fn lock_id(json: &[u8]) -> Option<String> {
    let record: serde_json::Value = serde_json::from_slice(json).ok()?;
    record.get("lockId")?.as_str().map(str::to_owned)
}

/// Returns the key of a request as a JSON string, followed by the field `holder` if it has one.
pub(super) fn key_and_holder(request: &AcquireRequest) -> String {
    with_holder(request.key(), request.holder())
}

/// Returns a key as a JSON string, followed by the field `holder` if there is one.
pub(super) fn with_holder(key: &Key, holder: Option<&HolderInfo>) -> String {
    const FIELD: &str = ",\"holder\":";
    let holder = holder.map(HolderInfo::as_str);
    // Room for quotes and a few escapes.
    let holder_bytes = holder.map_or(0, |holder| FIELD.len() + holder.len());
    let mut json = Vec::with_capacity(key.as_str().len() + holder_bytes + 16);
    push_quoted(&mut json, key.as_str());
    if let Some(holder) = holder {
        json.extend_from_slice(FIELD.as_bytes());
        push_quoted(&mut json, holder);
    }
    String::from_utf8(json).expect("BUG: JSON is valid UTF-8")
}

fn push_quoted(json: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(json, text).expect("BUG: every string is valid in JSON");
}

fn millis(number: f64) -> Option<Timestamp> {
    const TWO_TO_THE_53: f64 = 9_007_199_254_740_992.0;
    if !(0.0..TWO_TO_THE_53).contains(&number) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let whole = number as u64;
    Some(Timestamp::from_millis(whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::ttl::Ttl;

    #[test]
    fn any_order_any_escapes_any_numbers_and_unknown_fields_are_read() {
        let json = br#"{"fence":"000000000000007","acquiredAtMs":1.794769120208e+12,"more":[1],
            "key":"a\/b","expiresAtMs":1794769150208.0,"lockId":"WERfqnNu2ScFxRRPeY_ufw"}"#;
        let lock = parse(json).expect("a record");
        assert_eq!(lock.key.as_str(), "a/b");
        assert_eq!(lock.token.get(), 7);
        assert_eq!(lock.acquired_at.as_millis(), 1_794_769_120_208);
        assert_eq!(lock.expires_at.as_millis(), 1_794_769_150_208);
        assert_eq!(lock.holder, None);
    }

    #[test]
    fn a_holder_is_read_and_anything_else_in_its_field_is_ignored() {
        let record = |holder: &str| {
            let json = format!(
                r#"{{"lockId":"WERfqnNu2ScFxRRPeY_ufw","expiresAtMs":2,"acquiredAtMs":1,
                "key":"k","holder":{holder},"fence":"000000000000007"}}"#
            );
            parse(json.as_bytes()).expect("a record").holder
        };
        let holder = record(r#""web-3\/4211\/sh""#).expect("a holder");
        assert_eq!(holder.as_str(), "web-3/4211/sh");
        for other in ["null", "7", "[1]", r#"{"host":"a"}"#, r#""free text""#] {
            assert_eq!(record(other), None, "{other}");
        }
    }

    #[test]
    fn no_record_panics() {
        let seeds: [&[u8]; 2] = [
            br#"{"lockId":"WERfqnNu2ScFxRRPeY_ufw","expiresAtMs":2,"acquiredAtMs":1,"key":"k",
                "fence":"000000000000007"}"#,
            br#"{"fence":"000000000000007","acquiredAtMs":1.794769120208e+12,"more":[1,{"a":null}],
                "key":"a\/b\u00e9","expiresAtMs":1794769150208.0,
                "lockId":"WERfqnNu2ScFxRRPeY_ufw"}"#,
        ];
        test_support::fuzz("redis_record", env!("CARGO_MANIFEST_DIR"), seeds, |json| {
            match parse(json) {
                Ok(lock) => {
                    let request = AcquireRequest::new(lock.key.clone(), Ttl::DEFAULT);
                    let quoted = key_and_holder(&request.expect("randomness"));
                    let unquoted: String = serde_json::from_str(&quoted).expect("JSON");
                    assert_eq!(unquoted, lock.key.as_str());
                    format!("a lock, {}", lock.expires_at.as_millis() < 1 << 53)
                }
                // The error is always the same, so tell apart where the JSON ends.
                Err(_) => match serde_json::from_slice::<Record>(json) {
                    Ok(_) => "a record, but no lock".to_owned(),
                    Err(cause) => cause.to_string().chars().filter(|c| !c.is_numeric()).collect(),
                },
            }
        });
    }

    #[test]
    fn invalid_records_are_errors() {
        let good = r#"{"lockId":"WERfqnNu2ScFxRRPeY_ufw","expiresAtMs":2,"acquiredAtMs":1,
            "key":"k","fence":"000000000000007"}"#;
        assert!(parse(good.as_bytes()).is_ok());
        for (from, to) in [
            ("WERfqnNu2ScFxRRPeY_ufw", "short"),
            ("000000000000007", "7"),
            (":2,", ":-2,"),
            (":2,", ":1e300,"),
            (":\"k\"", ":\"\""),
            ("{", "["),
        ] {
            let error = parse(good.replace(from, to).as_bytes()).expect_err(to);
            assert_eq!(error.code(), crate::ErrorCode::Internal);
        }
    }
}
