//! `torture`: the coordinator, and by a hidden command, its client processes.

use std::process::ExitCode;

use torture::client::{self, ClientOptions};
use torture::command::{self, Options};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "client"
    {
        let options = ClientOptions::parse(rest).expect("started by the coordinator");
        client::run(&options);
        return ExitCode::SUCCESS;
    }
    let outcome = Options::parse(&arguments).and_then(|options| {
        let runtime = tokio::runtime::Runtime::new().map_err(|cause| cause.to_string())?;
        runtime.block_on(command::run(options))
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("torture: {message}");
            ExitCode::FAILURE
        }
    }
}
