//! `completions` and `man`: what shells and `man` need.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::{FAILED, Failure};

pub(crate) fn completions(shell: Shell) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "syncguard", &mut script);
    // Whoever reads may have seen enough.
    drop(std::io::stdout().write_all(&script));
    0
}

pub(crate) fn man(directory: Option<&Path>) -> Result<u8, Failure> {
    let failed = |cause: std::io::Error| Failure::new(FAILED, format!("no manual page: {cause}"));
    if let Some(directory) = directory {
        clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
        return Ok(0);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(failed)?;
    drop(std::io::stdout().write_all(&page));
    Ok(0)
}
