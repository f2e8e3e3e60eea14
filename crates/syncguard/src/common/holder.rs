//! Who holds a lock.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "_sql")]
use super::lock_id::LockId;

/// Who holds a lock: a host, a process, a program, and an optional label.
///
/// * Its text has at most 256 bytes and no control characters; longer parts are cut.
/// * It contains no arguments of the program and nothing from its environment.
/// * It is for display only. What a store returns may have been written by any program.
///
/// ```
/// use syncguard::{Key, Locker, MemoryBackend, diagnostics};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> syncguard::Result<()> {
/// let locker = Locker::builder(MemoryBackend::new()).holder("billing-worker").build()?;
/// let guard = locker.lock("job").await?;
/// let holder = locker.info("job").await?.expect("held").holder.expect("known");
/// assert_eq!(holder.label(), Some("billing-worker"));
/// assert_eq!(holder.pid(), std::process::id());
/// # drop(guard); locker.shutdown().await
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HolderInfo {
    /// `host/pid/program`, or `host/pid/program/label`. Only the label may contain a slash.
    text: Arc<str>,
}

/// The longest text.
const LIMIT_BYTES: usize = 256;

/// The longest host name and the longest program name.
const LIMIT_NAME_BYTES: usize = 64;

impl HolderInfo {
    /// Describes this process, with an optional label.
    #[must_use]
    pub fn of_this_process(label: Option<&str>) -> Self {
        let program = std::env::args_os().next().map(std::path::PathBuf::from);
        let program = program.as_deref().and_then(|path| path.file_name());
        let program = program.map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Self::new(&host_name(), std::process::id(), &program, label)
    }

    fn new(host: &str, pid: u32, program: &str, label: Option<&str>) -> Self {
        let name = |text: &str| match sanitized(&text.replace('/', "_"), LIMIT_NAME_BYTES) {
            name if name.is_empty() => "unknown".to_owned(),
            name => name,
        };
        let mut text = format!("{}/{pid}/{}", name(host), name(program));
        let room = LIMIT_BYTES - text.len() - 1;
        let label = label.map(|label| sanitized(label, room)).filter(|label| !label.is_empty());
        if let Some(label) = label {
            text.push('/');
            text.push_str(&label);
        }
        Self { text: text.into() }
    }

    /// Parses a stored text. Returns `None` for anything that this type would not write.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, '/');
        let (host, pid, program) = (parts.next()?, parts.next()?, parts.next()?);
        let is_ours = text.len() <= LIMIT_BYTES
            && !host.is_empty()
            && !program.is_empty()
            && parts.next() != Some("")
            && pid.parse::<u32>().is_ok();
        is_ours.then(|| Self { text: text.into() })
    }

    /// Returns the text to store.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns a copy that shares no memory with this one, so that threads do not contend for its
    /// reference count.
    pub(crate) fn unshared(&self) -> Self {
        Self { text: Arc::from(&*self.text) }
    }

    /// Returns the text to store in a column that other writers of the row do not know. They leave
    /// it behind for the next holder, so it begins with the hash of the lock id.
    #[cfg(feature = "_sql")]
    pub(crate) fn tagged(&self, lock_id: &LockId) -> String {
        format!("{} {}", lock_id.hash_id(), self.text)
    }

    /// Parses the text of such a column. Returns `None` if it belongs to another lock id.
    #[cfg(feature = "_sql")]
    pub(crate) fn parse_tagged(text: &str, lock_id: &LockId) -> Option<Self> {
        let (tag, text) = text.split_once(' ')?;
        (tag == lock_id.hash_id().as_str()).then(|| Self::parse(text))?
    }

    fn part(&self, place: usize) -> Option<&str> {
        self.text.splitn(4, '/').nth(place)
    }

    /// Returns the host name.
    #[must_use]
    pub fn host(&self) -> &str {
        self.part(0).unwrap_or_default()
    }

    /// Returns the process id, which is unique on its host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.part(1).and_then(|pid| pid.parse().ok()).unwrap_or_default()
    }

    /// Returns the file name of the program.
    #[must_use]
    pub fn program(&self) -> &str {
        self.part(2).unwrap_or_default()
    }

    /// Returns the label that the program gave itself.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.part(3)
    }
}

/// Prints host, process and label, or the program if there is no label: `web-3, pid 4211, deploy`.
/// Control characters, which only another program can have written, are escaped.
impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.label().unwrap_or(self.program());
        for letter in format!("{}, pid {}, {name}", self.host(), self.pid()).chars() {
            if letter.is_control() {
                write!(f, "{}", letter.escape_default())?;
            } else {
                write!(f, "{letter}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HolderInfo({:?})", &*self.text)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for HolderInfo {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut holder = serializer.serialize_struct("HolderInfo", 4)?;
        holder.serialize_field("host", self.host())?;
        holder.serialize_field("pid", &self.pid())?;
        holder.serialize_field("program", self.program())?;
        holder.serialize_field("label", &self.label())?;
        holder.end()
    }
}

/// Who broke a lock, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BreakNote {
    /// Who broke it.
    pub by: Option<HolderInfo>,
    /// The reason that was given.
    pub reason: Option<Arc<str>>,
}

impl BreakNote {
    /// Creates a note. Control characters in the reason are removed, and it is cut after 256 bytes.
    #[must_use]
    pub fn new(by: Option<HolderInfo>, reason: Option<&str>) -> Self {
        let reason = reason.map(|reason| sanitized(reason, LIMIT_BYTES));
        Self { by, reason: reason.filter(|reason| !reason.is_empty()).map(Into::into) }
    }

    /// Returns the note as text: the holder, a line break, the reason.
    #[cfg(feature = "_break_notes")]
    pub(crate) fn to_text(&self) -> String {
        let by = self.by.as_ref().map_or("", HolderInfo::as_str);
        format!("{by}\n{}", self.reason.as_deref().unwrap_or_default())
    }

    /// Parses a note. Malformed parts are ignored, because any client may have written it.
    #[cfg(feature = "_break_notes")]
    pub(crate) fn parse(text: &str) -> Self {
        let (by, reason) = text.split_once('\n').unwrap_or((text, ""));
        Self::new(HolderInfo::parse(by), Some(reason))
    }
}

/// Removes control characters, and cuts the text after this many bytes.
fn sanitized(text: &str, limit_bytes: usize) -> String {
    let mut kept = String::new();
    for letter in text.chars().filter(|letter| !letter.is_control()) {
        if kept.len() + letter.len_utf8() > limit_bytes {
            break;
        }
        kept.push(letter);
    }
    kept.trim().to_owned()
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_read_back_as_it_was_written() {
        let holder = HolderInfo::new("web-3", 4211, "syncguard", Some("./deploy.sh"));
        assert_eq!(holder.as_str(), "web-3/4211/syncguard/./deploy.sh");
        assert_eq!(HolderInfo::parse(holder.as_str()), Some(holder.clone()));
        assert_eq!((holder.host(), holder.pid(), holder.program()), ("web-3", 4211, "syncguard"));
        assert_eq!(holder.label(), Some("./deploy.sh"));
        assert_eq!(holder.to_string(), "web-3, pid 4211, ./deploy.sh");
        let plain = HolderInfo::new("web-3", 4211, "worker", None);
        assert_eq!(
            (plain.label(), plain.to_string()),
            (None, "web-3, pid 4211, worker".to_owned())
        );
    }

    #[test]
    fn a_holder_is_bounded_and_has_no_control_characters() {
        let long = "é\n\u{1b}/".repeat(400);
        let holder = HolderInfo::new(&long, u32::MAX, &long, Some(&long));
        assert!(holder.as_str().len() <= LIMIT_BYTES, "{}", holder.as_str().len());
        assert!(!holder.as_str().contains(char::is_control));
        assert_eq!(HolderInfo::parse(holder.as_str()), Some(holder));
        let nameless = HolderInfo::new("", 1, "\n", Some("\t"));
        assert_eq!(nameless.as_str(), "unknown/1/unknown");
    }

    #[test]
    fn a_text_is_cut_at_its_limit_and_never_within_a_letter() {
        for (text, limit, kept) in
            [("abcd", 4, "abcd"), ("abcde", 4, "abcd"), ("éé", 4, "éé"), ("éé", 3, "é")]
        {
            assert_eq!(sanitized(text, limit), kept, "{text} {limit}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_host_is_that_of_the_kernel() {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux has it");
        assert_eq!(host_name(), host.trim_end());
    }

    #[test]
    fn foreign_text_is_no_holder_and_is_never_printed_raw() {
        for foreign in ["", "text", "a/b/c", "a/1/", "/1/b", "a/-1/b", "a/1/b/", &"a".repeat(300)] {
            assert_eq!(HolderInfo::parse(foreign), None, "{foreign}");
        }
        let evil = HolderInfo::parse("web\u{1b}[2J/1/sh/a\nb").expect("it has all parts");
        assert!(!evil.to_string().contains(char::is_control), "{evil}");
        assert!(!format!("{evil:?}").contains(char::is_control));
    }

    #[cfg(feature = "_sql")]
    #[test]
    fn a_tagged_holder_belongs_to_its_lock_id_only() {
        let holder = HolderInfo::of_this_process(Some("x"));
        let (ours, other) = (LockId::random().expect("ok"), LockId::random().expect("ok"));
        let stored = holder.tagged(&ours);
        assert_eq!(HolderInfo::parse_tagged(&stored, &ours), Some(holder));
        assert_eq!(HolderInfo::parse_tagged(&stored, &other), None);
        assert_eq!(HolderInfo::parse_tagged("nonsense", &ours), None);
    }

    #[cfg(feature = "_break_notes")]
    #[test]
    fn a_note_is_read_back_as_it_was_written() {
        let by = HolderInfo::of_this_process(None);
        let note = BreakNote::new(Some(by), Some(" stuck\nsince monday "));
        assert_eq!(note.reason.as_deref(), Some("stucksince monday"));
        assert_eq!(BreakNote::parse(&note.to_text()), note);
        assert_eq!(BreakNote::parse("nonsense"), BreakNote::default());
    }
}
