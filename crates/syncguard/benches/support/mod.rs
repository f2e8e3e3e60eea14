//! Shared parts of the benchmarks: a table on the terminal, figures as JSON, and statistics.

use std::fmt::Write as _;
use std::path::PathBuf;

/// One line of the results.
struct Figure {
    /// The section of the page.
    section: &'static str,
    /// What was measured.
    name: String,
    /// The measured value.
    value: f64,
    /// The unit.
    unit: &'static str,
    /// The demand, if there is one.
    demand: Option<Demand>,
}

/// What a figure must reach.
#[derive(Clone, Copy)]
pub(crate) enum Demand {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

impl Demand {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

/// Collects figures, prints them, and writes them to a file.
#[derive(Default)]
#[allow(dead_code, reason = "every benchmark uses a part of it")]
pub(crate) struct Report {
    figures: Vec<Figure>,
    histograms: Vec<Histogram>,
    curves: Vec<Curve>,
    section: &'static str,
}

/// How a value grows with a number.
struct Curve {
    section: &'static str,
    name: String,
    unit: &'static str,
    points: Vec<(f64, f64)>,
}

/// How often each of a range of values was measured.
struct Histogram {
    section: &'static str,
    name: String,
    unit: &'static str,
    /// The upper ends of the ranges, and the counts.
    counts: Vec<(f64, usize)>,
}

#[allow(dead_code, reason = "every benchmark uses a part of it")]
impl Report {
    /// Adds a figure without a demand.
    pub(crate) fn info(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        let (section, name) = (self.section, name.into());
        self.figures.push(Figure { section, name, value, unit, demand: None });
    }

    /// Adds a figure with a demand.
    pub(crate) fn check(
        &mut self,
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        demand: Demand,
    ) {
        let (section, name, demand) = (self.section, name.into(), Some(demand));
        self.figures.push(Figure { section, name, value, unit, demand });
    }

    /// Begins a section. The figures that follow belong to it.
    pub(crate) fn section(&mut self, section: &'static str) {
        self.section = section;
    }

    /// Adds how a value grows with a number, of which there are at least two points, and demands
    /// that it grows no faster than `n log n`: from the first point to the last, and at most by
    /// twice as much, because single measurements vary.
    ///
    /// If the value is that of one of `n` operations, pass `per_operation`: it then grows no faster
    /// than `log n`.
    pub(crate) fn growth(
        &mut self,
        name: &str,
        unit: &'static str,
        points: &[(f64, f64)],
        per_operation: bool,
    ) {
        let ((fewest, start), (most, end)) = (points[0], points[points.len() - 1]);
        let count = if per_operation { 1.0 } else { most / fewest };
        let allowed = 2.0 * count * most.ln() / fewest.ln();
        for (number, value) in points {
            self.info(format!("{name}, {number}"), *value, unit);
        }
        // Below this, a value is not distinguished from nothing.
        let start = start.max(1e-3);
        let (ratio, name) = (end / start / allowed, name.to_owned());
        let bound = if per_operation { "2 log n" } else { "2 n log n" };
        self.check(format!("{name}: growth / {bound}"), ratio, "", Demand::AtMost(1.0));
        let (section, points) = (self.section, points.to_vec());
        self.curves.push(Curve { section, name, unit, points });
    }

    /// Adds the distribution of many values, in ranges of which each is twice as wide as the last.
    pub(crate) fn histogram(
        &mut self,
        name: impl Into<String>,
        values: &[f64],
        unit: &'static str,
    ) {
        let mut counts: Vec<(f64, usize)> = Vec::new();
        let mut end = 0.0625;
        while counts.iter().map(|(_, count)| count).sum::<usize>() < values.len() {
            let start = counts.last().map_or(f64::NEG_INFINITY, |(end, _)| *end);
            let within = values.iter().filter(|value| (start..end).contains(*value)).count();
            counts.push((end, within));
            end *= 2.0;
        }
        let (section, name) = (self.section, name.into());
        self.histograms.push(Histogram { section, name, unit, counts });
    }

    /// Prints the table, writes the JSON, and exits with code 1 if a demand is not met.
    pub(crate) fn finish(self, backend: &str) {
        let width = self.figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0);
        let mut json = String::new();
        let mut all_met = true;
        println!("\n{backend}");
        let mut shown_section = "";
        for figure in &self.figures {
            let Figure { section, name, value, unit, demand } = figure;
            if *section != shown_section {
                println!(" {section}");
                shown_section = section;
            }
            let mut shown_demand = String::new();
            let (text, met) = match demand {
                None => (String::new(), true),
                Some(demand) => {
                    let met = demand.is_met(*value);
                    let word = if met { "ok" } else { "MISSED" };
                    let bound = match demand {
                        Demand::AtLeast(least) => format!("at least {least}"),
                        Demand::AtMost(most) => format!("at most {most}"),
                    };
                    shown_demand.clone_from(&bound);
                    (format!("{bound:>16}  {word}"), met)
                }
            };
            all_met &= met;
            println!("  {name:width$}  {value:>14.3} {unit:10} {text}");
            let separator = if json.is_empty() { "" } else { "," };
            write!(
                json,
                "{separator}\n  {{\"backend\":\"{backend}\",\"section\":\"{section}\",\
                 \"name\":\"{name}\",\"value\":{value},\"unit\":\"{unit}\",\
                 \"demand\":\"{shown_demand}\",\"met\":{met}}}"
            )
            .expect("writing to a string");
        }
        for Histogram { section, name, unit, counts } in &self.histograms {
            let counts: Vec<String> =
                counts.iter().map(|(end, count)| format!("[{end},{count}]")).collect();
            let counts = counts.join(",");
            write!(
                json,
                ",\n  {{\"backend\":\"{backend}\",\"section\":\"{section}\",\
                 \"name\":\"{name}\",\"unit\":\"{unit}\",\"histogram\":[{counts}]}}"
            )
            .expect("writing to a string");
        }
        for Curve { section, name, unit, points } in &self.curves {
            let points: Vec<String> =
                points.iter().map(|(number, value)| format!("[{number},{value}]")).collect();
            let points = points.join(",");
            write!(
                json,
                ",\n  {{\"backend\":\"{backend}\",\"section\":\"{section}\",\
                 \"name\":\"{name}\",\"unit\":\"{unit}\",\"curve\":[{points}]}}"
            )
            .expect("writing to a string");
        }
        if let Some(path) = std::env::var_os("SYNCGUARD_BENCH_OUT").map(PathBuf::from) {
            std::fs::write(path, format!("[{json}\n]\n")).expect("the results can be written");
        }
        if !all_met {
            std::process::exit(1);
        }
    }
}

/// Returns the median of a few measurements.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sorts many measurements and returns a percentile.
pub(crate) fn percentile(values: &mut [f64], percent: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "a small index")]
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let index = (values.len() as f64 * percent / 100.0) as usize;
    values[index.min(values.len() - 1)]
}
