//! The fencing token: a number that orders the holders of a key.

use std::fmt;
use std::str::FromStr;

use super::error::{Error, ErrorCode, Result};
use super::key::Key;

/// A fencing token: every acquisition of a key gets a larger one.
///
/// * Fences are ordered; compare two with `<`. Their texts compare the same way, because they are
///   zero-padded to [`Fence::DIGITS`] digits.
/// * A fence is serialized as text, so that no reader loses precision.
/// * Send it with every write, and let the resource refuse a fence below the largest it has seen.
///   This keeps a lease safe even if its holder was paused.
///
/// ```
/// use syncguard::Fence;
///
/// let (old, new) = (Fence::new(9)?, Fence::new(10)?);
/// assert!(old < new);
/// assert_eq!(new.to_string(), "000000000000010");
/// assert_eq!("000000000000010".parse::<Fence>()?, new);
/// # Ok::<(), syncguard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[doc(alias = "fencing token")]
#[doc(alias = "epoch")]
pub struct Fence(u64);

impl Fence {
    /// The number of decimal digits of a fence.
    pub const DIGITS: u32 = 15;
    /// The largest fence that is ever granted. After it, an acquire fails with
    /// [`ErrorCode::Internal`] and leaves the store unchanged.
    pub const MAX: Self = Self(900_000_000_000_000);
    /// The fence above which every grant logs a warning, so that you can switch to a new key in
    /// time.
    pub const WARN: Self = Self(90_000_000_000_000);
    /// The first fence of a key.
    pub const FIRST: Self = Self(1);

    const CAPACITY: u64 = 10_u64.pow(Self::DIGITS);

    /// Creates a fence from a number of at most [`Fence::DIGITS`] digits.
    pub fn new(number: u64) -> Result<Self> {
        if number < Self::CAPACITY {
            Ok(Self(number))
        } else {
            Err(Error::invalid(format!("fence has more than {} digits", Self::DIGITS)))
        }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the fence to grant when the stored counter is `counter`.
    ///
    /// Fails with [`ErrorCode::Internal`] above [`Fence::MAX`]. A backend calls it before it
    /// writes, so that the store stays unchanged.
    pub fn after(counter: u64) -> Result<Self> {
        match counter.checked_add(1) {
            Some(next) if next <= Self::MAX.0 => Ok(Self(next)),
            _ => Err(Error::new(
                ErrorCode::Internal,
                "the fence counter of this key is exhausted; use another key",
            )
            .without_effect()),
        }
    }

    /// Returns whether this fence is above [`Fence::WARN`].
    #[must_use]
    pub fn is_near_the_end(self) -> bool {
        self > Self::WARN
    }

    /// Logs a warning, with the hash of the key, if this fence is above [`Fence::WARN`]. A backend
    /// calls it with every fence that it grants.
    pub fn warn_near_the_end(self, key: &Key) {
        if self.is_near_the_end() {
            tracing::warn!(
                key_hash = %key.hash_id(),
                fence = %self,
                "the fence counter of this key is close to its limit; plan to use a new key"
            );
        }
    }
}

const _: () = assert!(
    Fence::CAPACITY <= 1 << 53,
    "a fence must survive a trip through a Lua or JavaScript double"
);
const _: () = assert!(Fence::WARN.0 < Fence::MAX.0, "the warning must come before the error");
const _: () = assert!(Fence::MAX.0 < Fence::CAPACITY, "the largest fence must have 15 digits");

/// Converts a fence for the signed integer columns of SQL databases.
impl From<Fence> for i64 {
    fn from(fence: Fence) -> Self {
        fence.0.cast_signed()
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> Self {
        fence.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0width$}", self.0, width = Self::DIGITS as usize)
    }
}

impl FromStr for Fence {
    type Err = Error;

    /// Parses exactly [`Fence::DIGITS`] digits.
    fn from_str(text: &str) -> Result<Self> {
        if text.len() == Self::DIGITS as usize && text.bytes().all(|b| b.is_ascii_digit()) {
            Ok(Self(text.parse().expect("BUG: 15 digits fit")))
        } else {
            Err(Error::invalid(format!("fence must be exactly {} digits", Self::DIGITS)))
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Fence {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Fence {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// States at the type level whether a backend fences, so that the compiler knows whether `fence()`
/// exists.
///
/// This trait is sealed: only [`Fenced`] and [`Unfenced`] implement it.
pub trait Fencing:
    sealed::Sealed + Clone + Copy + fmt::Debug + Send + Sync + Unpin + 'static
{
    /// The token of a grant: a [`Fence`] or `()`.
    type Token: Copy + fmt::Debug + PartialEq + Send + Sync + Unpin + 'static;

    /// Whether grants have a fence.
    const SUPPORTED: bool;

    /// Returns the fence, for code that is generic over the backend.
    fn fence(token: Self::Token) -> Option<Fence>;
}

/// Marks a backend whose grants all have a [`Fence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced;

/// Marks a backend without fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfenced;

impl Fencing for Fenced {
    type Token = Fence;
    const SUPPORTED: bool = true;

    fn fence(token: Fence) -> Option<Fence> {
        Some(token)
    }
}

impl Fencing for Unfenced {
    type Token = ();
    const SUPPORTED: bool = false;

    fn fence((): ()) -> Option<Fence> {
        None
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Fenced {}
    impl Sealed for super::Unfenced {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fence_is_one_and_the_last_is_max() {
        assert_eq!(Fence::after(0).expect("first"), Fence::FIRST);
        assert_eq!(Fence::after(Fence::MAX.get() - 1).expect("last"), Fence::MAX);
        let error = Fence::after(Fence::MAX.get()).expect_err("exhausted");
        assert_eq!(error.code(), ErrorCode::Internal);
        assert!(!error.may_have_taken_effect());
        assert!(Fence::after(u64::MAX).is_err());
    }

    #[test]
    fn a_fence_is_the_same_number_in_every_type() {
        let fence = Fence::new(42).expect("valid");
        assert_eq!((u64::from(fence), i64::from(fence)), (42, 42));
    }

    #[test]
    fn the_warning_starts_strictly_above_its_threshold() {
        assert!(!Fence::WARN.is_near_the_end());
        assert!(Fence::new(Fence::WARN.get() + 1).expect("valid").is_near_the_end());
    }
}
