//! Where the locks are: what was typed, the environment, or a file of this user.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use syncguard::AnyBackend;
use syncguard::sqlite::SqliteConfig;

use crate::address::Address;
use crate::args::Global;
use crate::exit::{FAILED, Failure, USAGE};
use crate::output::Output;

/// The variable that holds the URL. Commands that are run do not see it.
pub(crate) const VARIABLE: &str = "SYNCGUARD_URL";
/// The variable that forbids the default store.
const REQUIRE: &str = "SYNCGUARD_REQUIRE_URL";
/// A variable that only commands below `run` see.
const INSIDE: &str = "SYNCGUARD_FENCE";

/// Where the locks are, and who has said so.
#[derive(Debug)]
pub(crate) struct Target {
    url: String,
    source: Source,
    is_required: bool,
    output: Output,
}

/// Who has said where the locks are.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Option,
    File,
    Environment,
    /// Nobody.
    Default(PathBuf),
}

/// Whether a command is inside `syncguard run`.
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
                    return Err(Failure::new(USAGE, format!("{VARIABLE} is not UTF-8")));
                }
            }
        };
        Ok(Self { url, source, is_required, output })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Who has said where the locks are, as programs read it.
    pub(crate) fn source(&self) -> &'static str {
        match self.source {
            Source::Option => "--url",
            Source::File => "--url-file",
            Source::Environment => VARIABLE,
            Source::Default(_) => "default",
        }
    }

    /// Which store it is, without a password.
    pub(crate) fn place(&self) -> Option<String> {
        Address::parse(&self.url).map(|address| address.place())
    }

    /// Names the store in a failure that is about it.
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

    /// Connects to take locks. A file that is not there is created.
    pub(crate) async fn connect(&self) -> Result<AnyBackend, Failure> {
        self.prepare()?;
        Ok(self.open().await?)
    }

    /// What has to be in order before a store that takes locks can be opened, even repeatedly.
    pub(crate) fn prepare(&self) -> Result<(), Failure> {
        self.admit()?;
        if let Source::Default(file) = &self.source {
            return create_private_folder(file);
        }
        let Some(file) = self.file()? else { return Ok(()) };
        // A mistyped path does not become right by waiting.
        match file.parent() {
            Some(folder) if !folder.as_os_str().is_empty() && !folder.is_dir() => {
                Err(Failure::new(
                    FAILED,
                    format!(
                        "cannot open SQLite file {}: its directory does not exist",
                        file.display()
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// One attempt to open the store.
    pub(crate) async fn open(&self) -> Result<AnyBackend, syncguard::Error> {
        syncguard::connect(&self.url).await
    }

    /// Connects to look at locks. Nothing is created.
    pub(crate) async fn connect_existing(&self) -> Result<AnyBackend, Failure> {
        self.admit()?;
        match self.file()? {
            Some(file) if !file.exists() => match self.source {
                // Nobody has taken a lock yet, and that is an answer.
                Source::Default(_) => Ok(syncguard::connect("memory:").await?),
                _ => Err(Failure::new(
                    FAILED,
                    format!("cannot open SQLite file {}: it does not exist", file.display()),
                )
                .hint("`run`, `acquire` and `setup` create it")),
            },
            _ => Ok(self.open().await?),
        }
    }

    /// Whether the default store is used and has not been created yet.
    pub(crate) fn is_unused_default(&self) -> bool {
        matches!(&self.source, Source::Default(file) if !file.exists())
    }

    /// Refuses the default store where it would be a mistake, and says that it is used elsewhere.
    fn admit(&self) -> Result<(), Failure> {
        let Source::Default(file) = &self.source else { return Ok(()) };
        let hint = format!("name the store with --url, --url-file or {VARIABLE}");
        if is_inside_a_run() {
            let message =
                "inside `syncguard run` the store must be named: the URL is not passed on";
            return Err(Failure::new(USAGE, message).hint(hint));
        }
        if self.is_required {
            return Err(Failure::new(USAGE, "no store is named, and one is required").hint(hint));
        }
        self.output.note(&format!(
            "no --url, --url-file or {VARIABLE}: locks exclude only this user on this machine ({})",
            file.display()
        ));
        Ok(())
    }

    /// The file of a SQLite store.
    fn file(&self) -> Result<Option<PathBuf>, Failure> {
        if !self.url.starts_with("sqlite:") {
            return Ok(None);
        }
        Ok(Some(SqliteConfig::from_url(&self.url)?.path().to_owned()))
    }
}

/// The URL in a file.
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
        .ok_or_else(|| Failure::new(FAILED, "the path of the state directory is not UTF-8"))?;
    // What has a meaning in a URL.
    let path = path.replace('%', "%25").replace('?', "%3F").replace('#', "%23");
    Ok((format!("sqlite:{path}"), Source::Default(file)))
}

fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// `$XDG_STATE_HOME/syncguard/locks.db`, by default in `~/.local/state`.
fn default_file() -> Result<PathBuf, Failure> {
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local").join("state")))
        .ok_or_else(|| {
            Failure::new(FAILED, "there is no home directory for the default store")
                .hint("name a store with --url")
        })?;
    Ok(state.join("syncguard").join("locks.db"))
}

/// Others must not touch the locks of this user.
fn create_private_folder(file: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    // A service has a home directory that does not exist on purpose.
    if let Some(home) = absolute("HOME")
        && file.starts_with(&home)
        && !home.is_dir()
    {
        let message = format!("the home directory {} does not exist", home.display());
        return Err(Failure::new(FAILED, message).hint("name a store with --url"));
    }
    let folder = file.parent().unwrap_or(file);
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    created.map_err(|cause| {
        Failure::new(FAILED, format!("cannot create {}: {cause}", folder.display()))
            .hint("name a store with --url")
    })
}
