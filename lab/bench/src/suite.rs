//! The paper's benchmarks. Each gives the cost of one operation, so less is better. On a machine
//! that counts instructions, a nanosecond is an instruction.

use std::time::Duration;

use serde_json::Value;

use super::counts::unexpected;
use mercury_lab::{
    error::{Error, Result},
    machine::Machine,
};

/// Time limit of one benchmark, in wall time.
const LIMIT: Duration = Duration::from_secs(1200);

const FILES: &[(&str, &str)] = &[
    ("set-up", include_str!("../../guest/bench/set-up")),
    ("timed", include_str!("../../guest/bench/timed")),
    ("build", include_str!("../../guest/bench/build")),
];

/// The amount of each benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Clients of PostgreSQL and of dbench, and jobs of make.
    pub parallel: u32,
    /// Samples of each benchmark of lmbench.
    pub samples: u32,
    /// pgbench's transactions, for each client.
    pub transactions: u32,
    /// Seconds of dbench.
    pub dbench_seconds: u32,
    /// MiB that iperf3 sends over the loopback.
    pub iperf_mib: u32,
    pub pings: u32,
}

impl Amount {
    /// The amount for a machine that counts instructions, where only the work counts.
    pub const COUNTED: Self =
        Self { parallel: 1, samples: 3, transactions: 500, dbench_seconds: 1, iperf_mib: 300, pings: 4000 };
    /// The amount for a machine with wall time.
    pub const TIMED: Self =
        Self { parallel: 2, samples: 7, transactions: 400, dbench_seconds: 4, iperf_mib: 400, pings: 3000 };
}

/// A benchmark outside lmbench.
struct Application {
    name: &'static str,
    command: fn(&Amount) -> String,
    /// Returns the cost of an operation in nanoseconds, from the command's output.
    cost_ns: fn(&str, &Amount) -> Option<f64>,
}

const APPLICATIONS: &[Application] = &[
    Application {
        name: "postgres-read",
        command: |amount| {
            let Amount { parallel, transactions, .. } = amount;
            format!("pgbench -n -S -c {parallel} -j {parallel} -t {transactions} --random-seed=1 bench")
        },
        cost_ns: |output, _| Some(1e9 / word_after(output, "tps = ")?),
    },
    Application {
        name: "dbench",
        command: |amount| {
            let Amount { parallel, dbench_seconds, .. } = amount;
            format!("dbench -D /dev/shm -t {dbench_seconds} -c /usr/share/dbench/client.txt {parallel}")
        },
        cost_ns: |output, amount| {
            let operations = dbench_operations(output);
            (operations > 0).then(|| f64::from(amount.dbench_seconds) * 1e9 / operations as f64)
        },
    },
    Application {
        name: "build",
        command: |amount| format!("/run/bench/timed /run/bench/build {}", amount.parallel),
        cost_ns: |output, _| Some(1e3 * word_after(output, "elapsed_us ")?),
    },
    Application {
        name: "iperf3-loopback",
        command: |amount| format!("iperf3 -c 127.0.0.1 -n {}M -f k -J", amount.iperf_mib),
        cost_ns: |output, _| {
            let report: Value = serde_json::from_str(output).ok()?;
            let bits_per_second = report["end"]["sum_received"]["bits_per_second"].as_f64()?;
            Some(8.0 * f64::from(1 << 20) / bits_per_second * 1e9)
        },
    },
    Application {
        name: "ping-loopback",
        command: |amount| format!("/run/bench/timed ping -f -q -c {} 127.0.0.1", amount.pings),
        cost_ns: |output, amount| Some(1e3 * word_after(output, "elapsed_us ")? / f64::from(amount.pings)),
    },
];

/// Returns the operation of a benchmark, in words.
#[must_use]
pub fn operation(name: &str) -> &'static str {
    match name {
        "postgres-read" => "transaction (pgbench -S)",
        "dbench" => "operation",
        "build" => "build (make, gcc, ld)",
        "iperf3-loopback" => "MiB",
        "ping-loopback" => "echo",
        "ctx-2p-0k" | "ctx-16p-16k" | "ctx-16p-64k" => "switch",
        _ => "call",
    }
}

/// Puts the files and databases of the benchmarks in place.
///
/// # Errors
/// If the machine fails.
pub fn set_up(machine: &Machine) -> Result<()> {
    machine.sh("mkdir -p /run/bench")?;
    for (name, text) in FILES {
        machine.put(&format!("/run/bench/{name}"), text.as_bytes(), 0o755)?;
    }
    machine.command("/run/bench/set-up").timeout(LIMIT).run()?.check().map(drop)
}

/// Runs all benchmarks once. Returns names and costs, in nanoseconds.
///
/// # Errors
/// If a benchmark fails.
pub fn measure(machine: &Machine, amount: &Amount) -> Result<Vec<(String, f64)>> {
    let mut all = operating_system(machine, amount.samples)?;
    for application in APPLICATIONS {
        let output = machine.command(&(application.command)(amount)).timeout(LIMIT).run()?.check()?;
        let cost = (application.cost_ns)(&output.stdout, amount);
        let cost = cost.ok_or_else(|| {
            Error::Host(format!("{} printed an unexpected result: {}", application.name, output.stdout))
        })?;
        all.push((application.name.to_owned(), cost));
    }
    Ok(all)
}

/// Runs the part of lmbench that the paper has, by `mercury bench os`.
///
/// # Errors
/// If the command fails.
pub fn operating_system(machine: &Machine, samples: u32) -> Result<Vec<(String, f64)>> {
    let line = format!("mercury --json bench os --samples {samples}");
    let output = machine.command(&line).timeout(LIMIT).run()?.check()?;
    let report: Value = serde_json::from_str(&output.stdout)
        .map_err(|error| Error::Host(format!("`{line}` printed no JSON: {error}")))?;
    let benchmarks = report["benchmarks"].as_array().ok_or_else(|| unexpected("bench os", &report))?;
    let one = |benchmark: &Value| {
        Some((benchmark["name"].as_str()?.to_owned(), 1e3 * benchmark["us"]["median"].as_f64()?))
    };
    benchmarks.iter().map(|benchmark| one(benchmark).ok_or_else(|| unexpected("bench os", &report))).collect()
}

/// Returns the number after a label.
pub(super) fn word_after(output: &str, label: &str) -> Option<f64> {
    output.split_once(label)?.1.split_whitespace().next()?.parse().ok()
}

/// Returns the sum of the first column of dbench's table: ` NTCreateX      16852     0.027
/// 0.157`.
pub(super) fn dbench_operations(output: &str) -> u64 {
    let table = output.split_once("-----\n").map_or("", |(_, table)| table);
    let rows = table.lines().take_while(|line| !line.trim().is_empty());
    rows.filter_map(|row| row.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DBENCH: &str = "   1     48375   275.41 MB/sec  execute   1 sec  latency 0.325 ms\n\n \
        Operation      Count    AvgLat    MaxLat\n ----------------------------------------\n \
        NTCreateX      16852     0.027     0.157\n Close          12424     0.002     0.111\n\n\
        Throughput 275.405 MB/sec  1 clients  1 procs  max_latency=0.325 ms\n";

    #[test]
    fn reports_are_read() {
        assert_eq!(dbench_operations(DBENCH), 29_276);
        assert_eq!(dbench_operations("nothing"), 0);
        assert_eq!(word_after("tps = 837.226436 (without initial)", "tps = "), Some(837.226_436));
        assert_eq!(word_after("elapsed_us x", "elapsed_us "), None);
    }
}
