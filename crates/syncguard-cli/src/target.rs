//! Selects the store: from the options, the environment, or the per-user default file.

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use syncguard::AnyBackend;
use syncguard::sqlite::SqliteConfig;

use crate::address::Address;
use crate::args::Global;
use crate::exit::{FAILED, Failure, USAGE};
use crate::output::Output;

/// The variable that holds the URL. It is removed from the environment of the command.
pub(crate) const VARIABLE: &str = "SYNCGUARD_URL";
/// The variable that disables the default store.
const REQUIRE: &str = "SYNCGUARD_REQUIRE_URL";
/// A variable that is set only inside `syncguard run`.
const INSIDE: &str = "SYNCGUARD_FENCE";

/// The store, and the source of its URL.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    url: String,
    source: Source,
    is_required: bool,
    output: Output,
}

/// The source of the URL.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Option,
    File,
    Environment,
    /// None: the default file is used.
    Default(PathBuf),
}

/// Returns whether this process runs inside `syncguard run`.
pub(crate) fn is_inside_a_run() -> bool {
    std::env::var_os(INSIDE).is_some()
}

impl Target {
    pub(crate) fn choose(global: &Global, output: Output) -> Result<Self, Failure> {
        let is_required = global.require_url
            || std::env::var_os(REQUIRE).is_some_and(|value| !value.is_empty() && value != "0");
        let (url, source) = if let Some(url) = &global.url {
            (url.clone(), Source::Option)
        } else if let Some(path) = &global.url_file {
            (read(path, output)?, Source::File)
        } else {
            match std::env::var(VARIABLE) {
                Ok(url) if !url.is_empty() => (url, Source::Environment),
                Ok(_) | Err(std::env::VarError::NotPresent) => default_url()?,
                Err(std::env::VarError::NotUnicode(_)) => {
                    return Err(Failure::new(USAGE, format!("{VARIABLE} is not valid UTF-8")));
                }
            }
        };
        Ok(Self { url, source, is_required, output })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the source of the URL, as it appears in JSON.
    pub(crate) fn source(&self) -> &'static str {
        match self.source {
            Source::Option => "--url",
            Source::File => "--url-file",
            Source::Environment => VARIABLE,
            Source::Default(_) => "default",
        }
    }

    /// Returns the name of the store, without a password.
    pub(crate) fn place(&self) -> Option<String> {
        Address::parse(&self.url).map(|address| address.place())
    }

    /// Adds the name of the store to a failure of the store.
    pub(crate) fn locate(&self, failure: Failure) -> Failure {
        let Some(address) = Address::parse(&self.url).filter(|_| failure.is_about_the_store())
        else {
            return failure;
        };
        let message = match address.unresolved_host() {
            Some(host) => format!("cannot resolve {} host {host}", address.product()),
            None => format!("{}: {failure}", address.place()),
        };
        failure.located(message)
    }

    /// Connects for a command that acquires locks. Creates a missing file.
    pub(crate) async fn connect(&self) -> Result<AnyBackend, Failure> {
        self.prepare()?;
        Ok(self.open().await?)
    }

    /// Checks the URL and creates the default directory. Call this once before [`Self::open`].
    pub(crate) fn prepare(&self) -> Result<(), Failure> {
        self.admit()?;
        if let Source::Default(file) = &self.source {
            return create_private_folder(file);
        }
        // Fail at once on a mistyped path instead of retrying until the wait ends.
        self.file()?.map_or(Ok(()), |file| check_folder(&file))
    }

    /// Makes one attempt to open the store.
    pub(crate) async fn open(&self) -> Result<AnyBackend, syncguard::Error> {
        syncguard::connect(&with_one_connection(&self.url)).await
    }

    /// Connects for a command that uses existing locks. Creates nothing.
    pub(crate) async fn connect_existing(&self) -> Result<AnyBackend, Failure> {
        self.admit()?;
        match self.file()? {
            Some(file) if !file.exists() => {
                if let Source::Default(_) = self.source {
                    // No lock was ever acquired, so an empty store gives the right result.
                    return Ok(syncguard::connect("memory:").await?);
                }
                check_folder(&file)?;
                let message =
                    format!("cannot open SQLite file {}: it does not exist", file.display());
                Err(Failure::new(FAILED, message).hint("`syncguard setup` creates it"))
            }
            _ => Ok(self.open().await?),
        }
    }

    /// Returns whether the default store is used and does not exist yet.
    pub(crate) fn is_unused_default(&self) -> bool {
        matches!(&self.source, Source::Default(file) if !file.exists())
    }

    /// Refuses the default store where it would be a mistake, and prints a note otherwise.
    fn admit(&self) -> Result<(), Failure> {
        let Source::Default(file) = &self.source else { return Ok(()) };
        let hint = format!("set --url, --url-file or {VARIABLE}");
        if is_inside_a_run() {
            let message = "no store URL: `syncguard run` does not pass its own to the command";
            return Err(Failure::new(USAGE, message).hint(hint));
        }
        if self.is_required {
            let message = "no store URL, and the default store is disabled";
            return Err(Failure::new(USAGE, message).hint(hint));
        }
        self.output.note(&format!(
            "no --url, --url-file or {VARIABLE}: using the default store, which only this user on \
             this machine shares ({})",
            file.display()
        ));
        Ok(())
    }

    /// Returns the file of a SQLite store.
    fn file(&self) -> Result<Option<PathBuf>, Failure> {
        if !self.url.starts_with("sqlite:") {
            return Ok(None);
        }
        Ok(Some(SqliteConfig::from_url(&self.url)?.path().to_owned()))
    }
}

/// Fails if the directory of a SQLite file does not exist.
fn check_folder(file: &Path) -> Result<(), Failure> {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && !folder.is_dir() => {
            let message =
                format!("cannot open SQLite file {}: its directory does not exist", file.display());
            Err(Failure::new(FAILED, message))
        }
        _ => Ok(()),
    }
}

/// Reads the URL from a file.
fn read(path: &Path, output: Output) -> Result<String, Failure> {
    let unreadable = |cause: std::io::Error| {
        Failure::new(FAILED, format!("cannot read URL file {}: {cause}", path.display()))
    };
    let url = fs::read_to_string(path).map_err(unreadable)?.trim().to_owned();
    if url.is_empty() {
        return Err(Failure::new(FAILED, format!("URL file {} is empty", path.display())));
    }
    let mode = fs::metadata(path).map_err(unreadable)?.permissions().mode();
    let has_secret = Address::parse(&url).is_none_or(|address| address.has_secret());
    if mode & 0o077 != 0 && has_secret {
        let path = path.display();
        output.note(&format!(
            "URL file {path} holds a password and other users can read it; run `chmod 600 {path}`"
        ));
    }
    Ok(url)
}

fn default_url() -> Result<(String, Source), Failure> {
    let file = default_file()?;
    let path = file
        .to_str()
        .ok_or_else(|| Failure::new(FAILED, "the path of the default store is not valid UTF-8"))?;
    // Escape the characters that are special in a URL.
    let path = path.replace('%', "%25").replace('?', "%3F").replace('#', "%23");
    Ok((format!("sqlite:{path}"), Source::Default(file)))
}

fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Returns `$XDG_STATE_HOME/syncguard/locks.db`, by default in `~/.local/state`.
fn default_file() -> Result<PathBuf, Failure> {
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local").join("state")))
        .ok_or_else(|| {
            Failure::new(FAILED, "no directory for the default store: HOME is unset or relative")
                .hint("set --url")
        })?;
    Ok(state.join("syncguard").join("locks.db"))
}

/// Creates the file's directory with mode 0700, because other users must not access the locks.
fn create_private_folder(file: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    // The home directory of a service may be missing on purpose.
    if let Some(home) = absolute("HOME")
        && file.starts_with(&home)
        && !home.is_dir()
    {
        let message = format!(
            "cannot create the default store: the home directory {} does not exist",
            home.display()
        );
        return Err(Failure::new(FAILED, message).hint("set --url"));
    }
    let folder = file.parent().unwrap_or(file);
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    created.map_err(|cause| {
        Failure::new(FAILED, format!("cannot create directory {}: {cause}", folder.display()))
            .hint("set --url")
    })
}

/// Limits PostgreSQL to one connection, unless the URL sets `pool_size`. The command performs one
/// operation at a time, so it needs no more, even while it waits.
fn with_one_connection(url: &str) -> Cow<'_, str> {
    let is_postgres = url.starts_with("postgres://") || url.starts_with("postgresql://");
    if !is_postgres || url.contains("pool_size=") {
        return Cow::Borrowed(url);
    }
    let separator = if url.contains('?') { '&' } else { '?' };
    Cow::Owned(format!("{url}{separator}pool_size=1"))
}
