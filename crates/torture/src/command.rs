//! The command line: which stores to torture, for how long, and with which bug.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use test_support::figure;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::bug::{BUGS, Bug};
use crate::plan::{Deployment, Plan};
use crate::report;
use crate::run::Run;

const USAGE: &str = "\
usage: torture [bugs] [STORE…] [--minutes N | --seconds N] [--seed S] [--bug NAME] [--jobs N]
               [--out DIRECTORY]

  bugs        plant every bug in turn, with the seeds in bugs.tsv, and check that each is found
  STORE       memory, sqlite, sqlite-replaced, redis, redis-sentinel, redis-cluster, redis-shards,
              postgres, postgres-pgbouncer, postgres-standby, firestore; all by default. STORE=N
              sets its seconds
  --minutes   how long to torture each store, 1 by default
  --seed      decides everything that is drawn; printed by every run
  --bug       plants a bug, which must be found
  --jobs      how many stores to torture at the same time, 1 by default
  --out       where to write the report and the logs, target/torture by default
";

/// The bugs to plant: the store, the name, and a seed with which it is found.
const SEEDS: &str = include_str!("../bugs.tsv");

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    plants_bugs: bool,
    stores: Vec<(Deployment, Option<Duration>)>,
    length: Option<Duration>,
    seed: u64,
    bug: Option<Bug>,
    jobs: usize,
    out: PathBuf,
}

impl Options {
    /// Reads the arguments.
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let seed = std::time::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_secs());
        let out = PathBuf::from("target/torture");
        let mut options = Self {
            plants_bugs: false,
            stores: Vec::new(),
            length: None,
            seed,
            bug: None,
            jobs: 1,
            out,
        };
        let number = |text: &str| {
            let number = text.parse::<f64>().ok().filter(|number| (0.01..1e6).contains(number));
            number.ok_or(format!("not a number above zero: {text}"))
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "bugs" => options.plants_bugs = true,
                "--minutes" => {
                    options.length = Some(Duration::from_secs_f64(60.0 * number(value()?)?));
                }
                "--seconds" => options.length = Some(Duration::from_secs_f64(number(value()?)?)),
                "--seed" => {
                    let seed = value()?.parse();
                    options.seed = seed.map_err(|_| "the seed is a whole number".to_owned())?;
                }
                "--jobs" => {
                    let jobs = value()?.parse().ok().filter(|jobs| *jobs > 0);
                    options.jobs = jobs.ok_or("--jobs needs a number")?;
                }
                "--bug" => {
                    let known = BUGS.map(|(name, _)| name).join(", ");
                    let bug = Bug::named(value()?);
                    options.bug =
                        Some(bug.ok_or(format!("unknown bug; expected one of: {known}"))?);
                }
                "--out" => options.out = value()?.into(),
                name => {
                    let (name, seconds) = match name.split_once('=') {
                        Some((name, seconds)) => (name, Some(number(seconds)?)),
                        None => (name, None),
                    };
                    let found = Deployment::ALL.into_iter().find(|store| store.name() == name);
                    let store = found.ok_or(format!("unknown store {name}\n\n{USAGE}"))?;
                    options.stores.push((store, seconds.map(Duration::from_secs_f64)));
                }
            }
        }
        if options.stores.is_empty() {
            options.stores = Deployment::ALL.map(|store| (store, None)).to_vec();
        }
        Ok(options)
    }

    /// Returns the plans to run, and the bugs to plant in them.
    fn runs(&self) -> Result<Vec<(Plan, Option<Bug>)>, String> {
        let length = self.length.unwrap_or(Duration::from_mins(1));
        if !self.plants_bugs {
            let plan = |(store, own): &(Deployment, Option<Duration>)| {
                (Plan::draw(self.seed, *store, own.unwrap_or(length)), self.bug)
            };
            return Ok(self.stores.iter().map(plan).collect());
        }
        let length = self.length.unwrap_or(Duration::from_secs(18));
        let mut runs = Vec::new();
        for line in SEEDS.lines().filter(|line| !line.starts_with('#')) {
            let [store, bug, seed] = line.split('\t').take(3).collect::<Vec<_>>()[..] else {
                return Err(format!("bugs.tsv: {line}"));
            };
            let (bug, seed) = (Bug::named(bug), seed.parse());
            let store = self.stores.iter().find(|(known, _)| known.name() == store);
            let (Some(bug), Ok(seed)) = (bug, seed) else {
                return Err(format!("bugs.tsv: {line}"));
            };
            if let Some((store, _)) = store {
                runs.push((Plan::draw(seed, *store, length), Some(bug)));
            }
        }
        Ok(runs)
    }
}

/// Runs the command.
pub async fn run(options: Options) -> Result<(), String> {
    let plans = options.runs()?;
    println!("seed: {}", options.seed);
    let jobs = Arc::new(Semaphore::new(options.jobs));
    let mut tasks = JoinSet::new();
    for (number, (plan, bug)) in plans.into_iter().enumerate() {
        let jobs = Arc::clone(&jobs);
        // Bugs of one store may run at the same time.
        let out = match bug {
            Some(bug) if options.plants_bugs => options.out.join("bugs").join(bug.name()),
            _ => options.out.clone(),
        };
        tasks.spawn(async move {
            let _job = jobs.acquire_owned().await;
            let run = crate::run::run(plan, bug, &out).await;
            if let Ok(run) = &run {
                summarize(run);
            }
            (number, run)
        });
    }
    let mut runs = Vec::new();
    while let Some(done) = tasks.join_next().await {
        let (number, run) = done.map_err(|cause| cause.to_string())?;
        runs.push((number, run.map_err(|cause| cause.to_string())?));
    }
    runs.sort_by_key(|(number, _)| *number);
    let runs: Vec<Run> = runs.into_iter().map(|(_, run)| run).collect();
    if options.plants_bugs {
        return found_bugs(&again(runs, &options.out).await?);
    }
    let path = options.out.join("report.html");
    report::write(&path, &runs).map_err(|cause| format!("{}: {cause}", path.display()))?;
    println!("report: {}", path.display());
    write_figures(&runs);
    let broken = runs.iter().filter(|run| !run.checked.violations.is_empty()).count();
    match (options.bug, broken) {
        (None, 0) => Ok(()),
        (None, _) => Err(format!("{broken} of {} runs broke a promise", runs.len())),
        (Some(_), _) if broken == runs.len() => Ok(()),
        (Some(bug), _) => Err(format!("the planted bug {} was not found everywhere", bug.name())),
    }
}

/// Repeats the runs that did not find their bug, one at a time: a busy machine excuses delays.
async fn again(mut runs: Vec<Run>, out: &Path) -> Result<Vec<Run>, String> {
    for run in runs.iter_mut().filter(|run| run.checked.violations.is_empty()) {
        let (plan, out) = (run.plan.clone(), out.join("again"));
        *run = crate::run::run(plan, run.bug, &out).await.map_err(|cause| cause.to_string())?;
        summarize(run);
    }
    Ok(runs)
}

/// Fails unless every planted bug was found.
fn found_bugs(runs: &[Run]) -> Result<(), String> {
    let missed = runs.iter().filter(|run| run.checked.violations.is_empty());
    let missed: Vec<String> = missed
        .map(|run| format!("{} {}", run.plan.deployment.name(), run.bug.map_or("", Bug::name)))
        .collect();
    figure("torture: planted bugs found", runs.len() - missed.len());
    figure("torture: planted bugs missed", missed.len());
    if missed.is_empty() {
        return Ok(());
    }
    Err(format!("planted bugs that were not found: {}", missed.join(", ")))
}

fn summarize(run: &Run) {
    let history = &run.history;
    let name = run.plan.deployment.name();
    let bug = run.bug.map(|bug| format!(" with {}", bug.name())).unwrap_or_default();
    println!(
        "== {name}{bug}, seed {}: {:.1} s, {} operations, {} calls, {} faults, {} histories ({} \
         undecided), {} stale writes refused, busy for {} %; {} violations",
        run.plan.seed,
        seconds(run, run.ended),
        history.ops.len(),
        history.calls.len(),
        run.damage.faults,
        run.checked.histories,
        run.checked.undecided,
        run.refused,
        run.busy_percent(),
        run.checked.violations.len(),
    );
    let shown = if run.bug.is_some() { 1 } else { 10 };
    for violation in run.checked.violations.iter().take(shown) {
        println!(
            "   {}: {} (key {}, {:.3} s to {:.3} s)",
            violation.rule,
            violation.what,
            violation.key.map_or_else(|| "-".to_owned(), |key| key.to_string()),
            seconds(run, violation.window.0),
            seconds(run, violation.window.1),
        );
    }
}

fn seconds(run: &Run, at: u64) -> f64 {
    Duration::from_micros(at.saturating_sub(run.began)).as_secs_f64()
}

/// Writes the figures of all runs.
fn write_figures(runs: &[Run]) {
    let sum = |value: fn(&Run) -> u64| runs.iter().map(value).sum::<u64>();
    figure("torture: kill -9", sum(|run| run.damage.kills));
    figure("torture: SIGSTOP", sum(|run| run.damage.stops));
    figure("torture: connections cut", sum(|run| run.damage.cuts));
    figure("torture: failovers", sum(|run| run.damage.failovers));
    figure("torture: packets sent twice", sum(|run| run.damage.duplicates));
    figure("torture: faults", sum(|run| run.damage.faults));
    figure("torture: operations at the stores", sum(|run| run.history.ops.len() as u64));
    figure("torture: dropped futures", sum(Run::dropped));
    figure("torture: stale writes refused", sum(|run| run.refused));
    figure("torture: stale writes accepted", sum(|run| run.broken("I3")));
    figure("torture: wrong releases", sum(|run| run.broken("I4")));
    figure("torture: violations", sum(|run| run.checked.violations.len() as u64));
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    for fault in runs.iter().flat_map(|run| &run.history.faults) {
        *faults.entry(&fault.name).or_default() += 1;
    }
    for (name, count) in faults {
        figure(&format!("faults: {name}"), count);
    }
    for run in runs {
        let name = run.plan.deployment.name();
        // The other deployments of a backend run for a shorter time.
        let kind = if name.contains('-') { "more histories" } else { "concurrent histories" };
        figure(&format!("{kind}: {name}"), run.checked.histories);
    }
}
