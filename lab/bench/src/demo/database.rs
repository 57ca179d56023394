//! pgbench, under which the mode is switched.

use std::time::Duration;

use mercury_lab::{
    command::{Background, Output},
    error::{Error, Result},
    machine::Machine,
};

/// The figures of one run of pgbench.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub per_second: f64,
    pub done: u64,
    pub failed: u64,
}

/// Starts pgbench's own mix (TPC-B) for `time`, or until [`stop`].
///
/// # Errors
/// If it cannot be started.
pub fn start(machine: &Machine, time: Duration) -> Result<Background> {
    let line = format!("exec pgbench -n -c 4 -j 2 -P 1 -T {} bench", time.as_secs());
    machine.spawn(&line)
}

/// Ends pgbench early; pgbench still reports. SIGALRM is the signal by which pgbench itself keeps
/// `-T`.
///
/// # Errors
/// If the machine has gone.
pub fn stop(run: &mut Background) -> Result<()> {
    const SIGALRM: i32 = 14;
    if run.has_ended()? { Ok(()) } else { run.kill(SIGALRM) }
}

/// Returns the last progress line: `progress: 3.0 s, 21.0 tps, lat …`.
#[must_use]
pub fn progress(output: &str) -> Option<String> {
    let line = output.lines().rev().find(|line| line.starts_with("progress: "))?;
    let per_second = line.split(", ").find_map(|part| part.strip_suffix(" tps"))?;
    Some(format!("{per_second} transactions a second"))
}

/// Reads pgbench's report.
///
/// # Errors
/// If the text is no report.
pub fn result(report: &str) -> Result<Measured> {
    let number = |label: &str| -> Option<f64> {
        let rest = report.lines().find_map(|line| line.trim().strip_prefix(label))?;
        rest.trim().split([' ', '/', '(']).next()?.parse().ok()
    };
    let measured = || {
        Some(Measured {
            per_second: number("tps = ")?,
            done: number("number of transactions actually processed: ")? as u64,
            failed: number("number of failed transactions: ")? as u64,
        })
    };
    measured().ok_or_else(|| Error::Host(format!("this is no report of pgbench's: {report}")))
}

/// Returns true if every counted transaction is in the tables once: pgbench's balances and its
/// history must have the same sums.
///
/// # Errors
/// If the database does not answer.
pub fn balances_agree(machine: &Machine) -> Result<bool> {
    const SUMS: &str = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from \
        pgbench_history) and (select sum(bbalance) from pgbench_branches) = (select sum(delta) from \
        pgbench_history) and (select sum(tbalance) from pgbench_tellers) = (select sum(delta) from \
        pgbench_history)";
    let answer: Output = machine.program(&["psql", "-At", "-c", SUMS, "bench"]).run()?.check()?;
    Ok(answer.stdout.trim() == "t")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "transaction type: <builtin: TPC-B (sort of)>\nnumber of transactions actually \
        processed: 217\n\
        number of failed transactions: 0 (0.000%)\nlatency average = 184.3 ms\ntps = 21.700123 (without \
        initial connection time)\n";

    #[test]
    fn reads_a_report() {
        assert_eq!(result(REPORT).ok(), Some(Measured { per_second: 21.700_123, done: 217, failed: 0 }));
        assert!(result("pgbench: error").is_err());
    }

    #[test]
    fn reads_progress() {
        let output =
            "progress: 1.0 s, 20.0 tps, lat 1 ms stddev 1, 0 failed\nprogress: 2.0 s, 23.0 tps, lat 1 ms";
        assert_eq!(progress(output).as_deref(), Some("23.0 transactions a second"));
        assert_eq!(progress("starting"), None);
    }
}
