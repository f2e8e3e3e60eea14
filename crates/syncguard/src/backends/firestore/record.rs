//! Stored documents, validated when they are read.

use std::collections::HashMap;

use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;

use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::holder::HolderInfo;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use crate::contract::stored_lock::StoredLock;
use api::value::ValueType;

/// The version of a document. A write can require that the document still has it.
pub(super) type Version = prost_types::Timestamp;

/// A lock and its document.
pub(super) struct Record {
    /// The full name of the document.
    pub(super) name: String,
    pub(super) version: Version,
    pub(super) lock: StoredLock,
}

/// The names of the fields, shared with the other implementations.
pub(super) const LOCK_ID: &str = "lockId";
pub(super) const EXPIRES_AT: &str = "expiresAtMs";
const ACQUIRED_AT: &str = "acquiredAtMs";
const KEY: &str = "key";
pub(super) const FENCE: &str = "fence";
const HOLDER: &str = "holder";
const KEY_DEBUG: &str = "keyDebug";

impl Record {
    /// Reads a document. Invalid fields are an error, never a panic.
    pub(super) fn read(document: api::Document) -> Result<Self> {
        let lock = (|| {
            let field = |name: &str| document.fields.get(name)?.value_type.as_ref();
            Some(
                StoredLock::new(
                    Key::new(text(field(KEY)?)?).ok()?,
                    LockId::parse(text(field(LOCK_ID)?)?).ok()?,
                    Fence::new(integer(field(FENCE)?)?).ok()?,
                )
                .acquired_at(Timestamp::from_millis(millis(field(ACQUIRED_AT)?)?))
                .expires_at(Timestamp::from_millis(millis(field(EXPIRES_AT)?)?))
                .held_by(field(HOLDER).and_then(text).and_then(HolderInfo::parse)),
            )
        })();
        let (Some(lock), Some(version)) = (lock, document.update_time) else {
            return Err(Error::foreign_lock());
        };
        Ok(Self { name: document.name, version, lock })
    }
}

/// Returns the value of a fence counter. A missing document or field counts as zero.
pub(super) fn read_counter(document: Option<&api::Document>) -> Result<u64> {
    let value = document.and_then(|document| document.fields.get(FENCE)?.value_type.as_ref());
    match value {
        None | Some(ValueType::NullValue(_)) => Ok(0),
        Some(ValueType::StringValue(text)) if text.is_empty() => Ok(0),
        Some(value) => integer(value).ok_or_else(Error::foreign_counter),
    }
}

/// Returns the fields of a lock.
pub(super) fn lock_fields(lock: &StoredLock) -> HashMap<String, api::Value> {
    let mut fields = fields([
        (LOCK_ID, string(lock.lock_id.expose())),
        (EXPIRES_AT, number(lock.expires_at)),
        (ACQUIRED_AT, number(lock.acquired_at)),
        (KEY, string(lock.key.as_str())),
        (FENCE, string(&lock.token.to_string())),
    ]);
    if let Some(holder) = &lock.holder {
        fields.insert(HOLDER.to_owned(), string(holder.as_str()));
    }
    fields
}

/// Returns the one field that an extend changes.
pub(super) fn expiry_field(expires_at: Timestamp) -> HashMap<String, api::Value> {
    fields([(EXPIRES_AT, number(expires_at))])
}

/// Returns the fields of a fence counter.
pub(super) fn counter_fields(fence: Fence, key: &Key) -> HashMap<String, api::Value> {
    fields([(FENCE, string(&fence.to_string())), (KEY_DEBUG, string(key.as_str()))])
}

fn fields<const N: usize>(fields: [(&str, api::Value); N]) -> HashMap<String, api::Value> {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

pub(super) fn string(text: &str) -> api::Value {
    api::Value { value_type: Some(ValueType::StringValue(text.to_owned())) }
}

fn number(time: Timestamp) -> api::Value {
    let millis = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    api::Value { value_type: Some(ValueType::IntegerValue(millis)) }
}

/// Returns a field of a document if it is a string.
pub(super) fn text_field<'a>(document: &'a api::Document, name: &str) -> Option<&'a str> {
    text(document.fields.get(name)?.value_type.as_ref()?)
}

fn text(value: &ValueType) -> Option<&str> {
    match value {
        ValueType::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Reads an integer, or a string of digits with any number of leading zeros, as older versions
/// wrote it.
fn integer(value: &ValueType) -> Option<u64> {
    match value {
        ValueType::IntegerValue(number) => u64::try_from(*number).ok(),
        ValueType::StringValue(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.parse().ok()
        }
        _ => None,
    }
}

/// Reads a time, which JavaScript may have written as a double.
fn millis(value: &ValueType) -> Option<u64> {
    /// The largest integer up to which a double represents every integer.
    const LARGEST: f64 = 9_007_199_254_740_991.0;
    match value {
        ValueType::IntegerValue(number) => u64::try_from(*number).ok(),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is in range, and fractions of a millisecond do not matter"
        )]
        ValueType::DoubleValue(number) if (0.0..=LARGEST).contains(number) => Some(*number as u64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn no_document_panics() {
        let key = Key::new("k").expect("valid");
        let fence = Fence::new(7).expect("valid");
        let lock_id = LockId::parse("WERfqnNu2ScFxRRPeY_ufw").expect("valid");
        let lock = StoredLock::new(key.clone(), lock_id, fence)
            .acquired_at(Timestamp::from_millis(1_794_769_120_208))
            .expires_at(Timestamp::from_millis(1_794_769_150_208));
        let update_time = Some(Version { seconds: 1_794_769_120, nanos: 208_000_000 });
        let name = "projects/p/databases/d/documents/locks/k".to_owned();
        let document = |fields| {
            let name = name.clone();
            api::Document { name, fields, create_time: None, update_time }.encode_to_vec()
        };
        let mut written_by_javascript = lock_fields(&lock);
        let double = |number| api::Value { value_type: Some(ValueType::DoubleValue(number)) };
        written_by_javascript.insert(EXPIRES_AT.to_owned(), double(1.794_769_150_208e12));
        let seeds = [
            document(lock_fields(&lock)),
            document(written_by_javascript),
            document(counter_fields(fence, &key)),
            document(HashMap::new()),
        ];
        let seeds = seeds.iter().map(Vec::as_slice);
        test_support::fuzz("firestore_document", env!("CARGO_MANIFEST_DIR"), seeds, |bytes| {
            let Ok(document) = api::Document::decode(bytes) else {
                return "no document".to_owned();
            };
            let counter = read_counter(Some(&document));
            let mut fields: Vec<_> = document.fields.keys().cloned().collect();
            fields.sort_unstable();
            let read = Record::read(document);
            if let Ok(record) = &read {
                // What was read can be written and read again.
                let fields = lock_fields(&record.lock);
                let again = api::Document { fields, update_time, ..api::Document::default() };
                let again = Record::read(again).expect("a lock");
                assert_eq!(again.lock.lock_id, record.lock.lock_id);
            }
            format!("{} {} {}", read.is_ok(), counter.is_ok(), fields.join(" "))
        });
    }
}
