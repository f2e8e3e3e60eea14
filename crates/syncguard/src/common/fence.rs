//! The number that orders the holders of a key.

use std::fmt;
use std::str::FromStr;

use super::error::{Error, ErrorCode, Result};
use super::key::Key;

/// A fencing token: every acquisition of a key gets a larger one.
///
/// * Ordered; compare two with `<`. The text compares the same way, because it has
///   [`Fence::DIGITS`] digits, zero padded.
/// * Serialized as text, so that no reader loses precision.
/// * Send it along with every write, and let the store refuse a fence below the largest it has
///   seen: that is what makes a lease safe when its holder was paused.
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
pub struct Fence(u64);

impl Fence {
    /// How many decimal digits a fence has.
    pub const DIGITS: u32 = 15;
    /// The largest fence that is ever granted. Above it an acquire fails with
    /// [`ErrorCode::Internal`] and the store ends as it was.
    pub const MAX: Self = Self(900_000_000_000_000);
    /// Above this fence every grant logs a warning, so that somebody rotates the key in time.
    pub const WARN: Self = Self(90_000_000_000_000);
    /// The first fence of a key.
    pub const FIRST: Self = Self(1);

    const CAPACITY: u64 = 10_u64.pow(Self::DIGITS);

    /// Makes a fence from a number of at most [`Fence::DIGITS`] digits.
    pub fn new(number: u64) -> Result<Self> {
        if number < Self::CAPACITY {
            Ok(Self(number))
        } else {
            Err(Error::invalid(format!("fence has more than {} digits", Self::DIGITS)))
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The fence to grant when the stored counter says `counter`.
    ///
    /// Fails with [`ErrorCode::Internal`] above [`Fence::MAX`]: check before writing, so that the
    /// store ends as it was.
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

    /// Whether a grant with this fence deserves a warning.
    #[must_use]
    pub fn is_near_the_end(self) -> bool {
        self > Self::WARN
    }

    /// Logs a warning about a grant that deserves one, with the hash of the key. A backend calls it
    /// with every fence that it grants.
    pub fn warn_near_the_end(self, key: &Key) {
        if self.is_near_the_end() {
            tracing::warn!(
                key_hash = %key.hash(),
                fence = %self,
                "the fence counter of this key nears its end; plan a new key"
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

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0width$}", self.0, width = Self::DIGITS as usize)
    }
}

impl FromStr for Fence {
    type Err = Error;

    /// Reads exactly [`Fence::DIGITS`] digits.
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

/// Whether a backend fences, as a type, so that the compiler knows whether `fence()` exists.
///
/// Sealed: [`Fenced`] and [`Unfenced`] are all there are.
pub trait Fencing:
    sealed::Sealed + Clone + Copy + fmt::Debug + Send + Sync + Unpin + 'static
{
    /// What a grant carries: a [`Fence`], or nothing.
    type Token: Copy + fmt::Debug + PartialEq + Send + Sync + Unpin + 'static;

    /// Whether grants carry a fence.
    const SUPPORTED: bool;

    /// The fence, for code that is generic over the backend.
    fn fence(token: Self::Token) -> Option<Fence>;
}

/// Marks a backend whose every grant carries a [`Fence`].
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
    fn the_warning_starts_strictly_above_its_threshold() {
        assert!(!Fence::WARN.is_near_the_end());
        assert!(Fence::new(Fence::WARN.get() + 1).expect("valid").is_near_the_end());
    }
}
