//! The command `syncguard`.

use clap::Parser;

/// Run commands while holding a distributed lock
#[derive(Debug, Parser)]
#[command(name = "syncguard", version, arg_required_else_help = true)]
struct Args {}

fn main() {
    Args::parse();
}
