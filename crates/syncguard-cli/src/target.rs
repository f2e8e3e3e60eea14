//! Where the locks are: what was typed, the environment, or a file of this user.

use std::fs;
use std::path::PathBuf;

use syncguard::AnyBackend;

use crate::args::Global;
use crate::exit::{FAILED, Failure, USAGE};

/// The variable that holds the URL. Commands that are run do not see it.
pub(crate) const VARIABLE: &str = "SYNCGUARD_URL";

/// Where the locks are, and whether somebody has said so.
#[derive(Debug)]
pub(crate) struct Target {
    url: String,
    pub(crate) is_default: bool,
}

impl Target {
    pub(crate) fn choose(global: &Global) -> Result<Self, Failure> {
        if let Some(url) = &global.url {
            return Ok(Self { url: url.clone(), is_default: false });
        }
        if let Some(path) = &global.url_file {
            let url = fs::read_to_string(path).map_err(|cause| {
                Failure::new(FAILED, format!("the file of the URL cannot be read: {cause}"))
            })?;
            return Ok(Self { url: url.trim().to_owned(), is_default: false });
        }
        match std::env::var(VARIABLE) {
            Ok(url) if !url.is_empty() => Ok(Self { url, is_default: false }),
            Ok(_) | Err(std::env::VarError::NotPresent) => {
                let path = default_file()?;
                let path = path.to_str().ok_or_else(|| {
                    Failure::new(FAILED, "the path of the state directory is no UTF-8")
                })?;
                // What has a meaning in a URL.
                let path = path.replace('%', "%25").replace('?', "%3F").replace('#', "%23");
                Ok(Self { url: format!("sqlite:{path}"), is_default: true })
            }
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(Failure::new(USAGE, format!("{VARIABLE} is no UTF-8")))
            }
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) async fn connect(&self) -> Result<AnyBackend, Failure> {
        if self.is_default {
            create_private_folder(&default_file()?)?;
        }
        Ok(syncguard::connect(&self.url).await?)
    }
}

/// `$XDG_STATE_HOME/syncguard/locks.db`, by default in `~/.local/state`.
fn default_file() -> Result<PathBuf, Failure> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local").join("state")))
        .ok_or_else(|| {
            Failure::new(FAILED, "there is no home directory for a lock file")
                .hint("say where the locks are with --url")
        })?;
    Ok(state.join("syncguard").join("locks.db"))
}

/// Others must not touch the locks of this user.
fn create_private_folder(file: &std::path::Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    let folder = file.parent().unwrap_or(file);
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    created.map_err(|cause| {
        Failure::new(FAILED, format!("the state directory cannot be created: {cause}"))
            .hint("say where the locks are with --url")
    })
}
