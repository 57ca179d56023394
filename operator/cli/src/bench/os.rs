//! `mercury bench os`: the nine operations of lmbench in both papers' tables, written anew, and two
//! more. Each figure is the median of several samples, and each sample is long enough for the
//! clock's resolution.

use super::{
    paper::{self, Figures},
    workloads::{self, Workload},
};
use clap::Args;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text, duration},
    progress,
    stats::Summary,
    sysroot::Sysroot,
};
use serde::Serialize;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub struct OsArgs {
    /// Samples of each benchmark; their median is shown
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub samples: u32,
    /// Only benchmarks whose name contains this text
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
}

const SAMPLE: Duration = Duration::from_millis(20);

/// The result of one benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Result1 {
    /// Name as `--only` takes it.
    pub name: &'static str,
    /// Microseconds per operation over the samples.
    pub us: Summary,
    /// Figures of the papers for the same operation.
    pub paper: Option<Figures>,
}

/// The results of all benchmarks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The CPUs that were online.
    pub cpus: usize,
    /// Results in the order of the papers' tables.
    pub benchmarks: Vec<Result1>,
}

/// A benchmark, and its setup.
struct Benchmark {
    name: &'static str,
    set_up: fn() -> std::io::Result<Workload>,
}

const BENCHMARKS: &[Benchmark] = &[
    Benchmark { name: "null-call", set_up: workloads::null_call },
    Benchmark { name: "fork", set_up: workloads::fork },
    Benchmark { name: "exec", set_up: workloads::exec },
    Benchmark { name: "sh", set_up: workloads::sh },
    Benchmark { name: "pipe", set_up: workloads::pipe_latency },
    Benchmark { name: "ctx-2p-0k", set_up: || workloads::context_switch(2, 0) },
    Benchmark { name: "ctx-16p-16k", set_up: || workloads::context_switch(16, 16) },
    Benchmark { name: "ctx-16p-64k", set_up: || workloads::context_switch(16, 64) },
    Benchmark { name: "mmap", set_up: workloads::map_file },
    Benchmark { name: "protection-fault", set_up: workloads::protection_fault },
    Benchmark { name: "page-fault", set_up: workloads::page_fault },
];

/// Runs the benchmarks whose name contains `only`.
pub fn measure(samples: u32, only: Option<&str>, stop: &dyn Fn() -> bool) -> Result<Report> {
    let chosen: Vec<_> =
        BENCHMARKS.iter().filter(|one| only.is_none_or(|only| one.name.contains(only))).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHMARKS.iter().map(|one| one.name).collect();
        return Err(Error::new(Exit::Usage, "no benchmark has such a name")
            .hint(format!("there are {}", names.join(", "))));
    }
    let mut benchmarks = Vec::new();
    for benchmark in chosen.into_iter().take_while(|_| !stop()) {
        progress::line(benchmark.name);
        benchmarks.push(run(benchmark, samples, stop)?);
    }
    progress::line("");
    Ok(Report { cpus: Sysroot::default().online_cpus().iter().count(), benchmarks })
}

fn run(benchmark: &Benchmark, samples: u32, stop: &dyn Fn() -> bool) -> Result<Result1> {
    let failed = |error: std::io::Error| {
        Error::new(Exit::Failed, format!("benchmark {} failed: {error}", benchmark.name)).hint(
            "free memory, or raise the limits of processes and open files (`ulimit -a`), \
                and repeat the command",
        )
    };
    let mut workload = (benchmark.set_up)().map_err(failed)?;
    let rounds = calibrate(&mut workload).map_err(failed)?;
    let mut times = Vec::new();
    for _ in (0..samples).take_while(|_| !stop()) {
        times.push(sample(&mut workload, rounds).map_err(failed)?);
    }
    Ok(Result1 { name: benchmark.name, us: Summary::of(times), paper: paper::figures(benchmark.name) })
}

/// Returns the number of rounds in a sample.
fn calibrate(workload: &mut Workload) -> std::io::Result<u64> {
    let mut rounds = 1;
    loop {
        let start = Instant::now();
        (workload.run)(rounds)?;
        let elapsed = start.elapsed();
        if elapsed >= SAMPLE / 4 {
            let wanted = rounds as f64 * SAMPLE.as_secs_f64() / elapsed.as_secs_f64();
            return Ok((wanted as u64).max(1));
        }
        rounds *= 4;
    }
}

/// Returns the microseconds per operation, without the workload's own overhead.
fn sample(workload: &mut Workload, rounds: u64) -> std::io::Result<f64> {
    let start = Instant::now();
    (workload.run)(rounds)?;
    let us = start.elapsed().as_secs_f64() * 1e6;
    let per_operation = us / (rounds * workload.operations_per_round) as f64;
    Ok((per_operation - workload.overhead_us).max(0.0))
}

/// The columns of a paper's table.
const COLUMNS: [&str; 4] = ["N-L", "M-N", "M-V", "X-U"];

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let is_single = self.cpus == 1;
        let jcst = |figures: Figures| if is_single { figures.jcst_2012_up } else { figures.jcst_2012_smp };
        let measured = |result: &Result1| [result.us.median, result.us.min, result.us.max].map(duration);
        let heading = ["", "median", "min", "max"].into_iter().chain(COLUMNS).map(String::from).collect();
        let rows = self.benchmarks.iter().map(|result| {
            let figures = result.paper.into_iter().flat_map(|figures| columns(jcst(figures)));
            [result.name.to_string()].into_iter().chain(measured(result)).chain(figures).collect()
        });
        to.table(&[heading].into_iter().chain(rows).collect::<Vec<Vec<String>>>());
        to.line("");
        let (table, machine) = if is_single { ("1", "one 3.0 GHz Xeon") } else { ("2", "two 3.0 GHz Xeons") };
        to.line(format!(
            "N-L and further columns are from JCST 2012, table {table} ({machine}, Linux 2.6.16): native \
             Linux, Mercury in native mode, Mercury attached, and a Xen guest. Compare ratios, not times."
        ));
        to.line("protection-fault includes the signal, which lmbench takes off.");
        let older = self.benchmarks.iter().filter_map(|result| Some((result.name, result.paper?)));
        let older = older.map(|(name, figures)| {
            [name.to_owned()].into_iter().chain(columns(figures.cluster_2007)).collect::<Vec<String>>()
        });
        let older: Vec<_> = older.collect();
        if older.is_empty() {
            return;
        }
        to.line("");
        to.line("The same columns from CLUSTER 2007, table 1 (one 3.0 GHz Pentium 4, Linux 2.6.16):");
        to.line("");
        let heading = [""].into_iter().chain(COLUMNS).map(String::from).collect();
        to.table(&[heading].into_iter().chain(older).collect::<Vec<_>>());
    }
}

fn columns(row: paper::Row) -> [String; 4] {
    [row.native_us, row.mercury_native_us, row.mercury_attached_us, row.xen_domain_u_us].map(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_benchmark_runs() {
        for benchmark in BENCHMARKS {
            let mut workload = (benchmark.set_up)().expect(benchmark.name);
            (workload.run)(3).expect(benchmark.name);
            assert!(workload.operations_per_round >= 1, "{}", benchmark.name);
        }
    }

    #[test]
    fn a_figure_comes_out() {
        let report = measure(2, Some("null"), &|| false).expect("measured");
        assert_eq!(report.benchmarks.len(), 1);
        assert!(report.benchmarks[0].us.median > 0.0);
        assert!(measure(1, Some("nonsense"), &|| false).is_err());
    }

    #[test]
    fn rendered() {
        let us = Summary { count: 3, min: 50.0, median: 55.5, p99: 70.0, max: 70.0 };
        let report = |cpus| Report {
            cpus,
            benchmarks: vec![
                Result1 { name: "null-call", us: us.scaled(0.001), paper: None },
                Result1 { name: "fork", us, paper: paper::figures("fork") },
            ],
        };
        let rendered = |cpus| {
            let mut text = Text::new(false);
            report(cpus).render(&mut text);
            text.finish()
        };
        insta::assert_snapshot!(rendered(2));
        assert!(rendered(1).contains("table 1 (one 3.0 GHz Xeon,"));
    }
}
