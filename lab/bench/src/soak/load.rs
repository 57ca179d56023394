//! All kinds of work at once, each with a result that can be wrong.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use serde_json::Value;

use mercury_lab::{
    command::Background,
    error::{Context, Error, Result},
    machine::Machine,
};

/// Time limit of the work's end. The running rounds are finished first.
const ENDS_WITHIN: Duration = Duration::from_secs(300);

const FILES: &[(&str, &str)] = &[
    ("again", include_str!("../../../guest/soak/again")),
    ("disk", include_str!("../../../guest/soak/disk")),
    ("network", include_str!("../../../guest/soak/network")),
];

#[derive(Debug)]
pub struct Load<'a> {
    machine: &'a Machine,
    running: Vec<(&'static str, Background)>,
    history_before: u64,
}

/// The results of one kind of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The name for people.
    pub name: &'static str,
    /// Rounds, transactions or blocks.
    pub passes: u64,
    /// Wrong results and failed rounds.
    pub violations: u64,
}

/// The comparison with PostgreSQL's tables at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Database {
    /// Transactions that pgbench was told are committed.
    pub acknowledged: u64,
    /// Transactions that pgbench was told have failed.
    pub failed: u64,
    /// Transactions found in the history table.
    pub found: u64,
    /// True if the balances of accounts, tellers and branches agree with the history table.
    pub balances_agree: bool,
}

impl<'a> Load<'a> {
    /// Starts all kinds of work. Rounds take `round`.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn start(machine: &'a Machine, round: Duration) -> Result<Self> {
        machine.sh("rm -rf /run/soak && mkdir /run/soak")?;
        for (name, text) in FILES {
            machine.put(&format!("/run/soak/{name}"), text.as_bytes(), 0o755)?;
        }
        machine.start_postgres()?;
        machine.sh("/mercury/lib/lab-network; iperf3 -s -D >/dev/null")?;
        let history_before = number(machine, "select count(*) from pgbench_history")?;
        let mut load = Self { machine, running: Vec::new(), history_before };
        let network = if machine.has_network() { Some(through_network_card(echo_server()?)) } else { None };
        for (name, line) in commands(round.as_secs()).into_iter().chain(network) {
            load.running.push((name, machine.spawn(&format!("exec {line}"))?));
        }
        Ok(load)
    }

    /// Checks that all work still runs.
    ///
    /// # Errors
    /// If the machine has gone, or some work has ended.
    pub fn check_running(&mut self) -> Result<()> {
        for (name, work) in &mut self.running {
            if work.has_ended()? {
                let said = work.output_so_far()?;
                return Err(self.machine.blame(Error::Unhealthy(format!("{name} has ended: {said}"))));
            }
        }
        Ok(())
    }

    /// Returns the transactions acknowledged so far, without those of the running round.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        let reports = self.machine.sh("cat /run/soak/database.log 2>/dev/null").unwrap_or_default();
        sum(&reports, "actually processed: ")
    }

    /// Ends all work and gathers the results.
    ///
    /// # Errors
    /// If some work does not end, or does not report.
    pub fn finish(self) -> Result<(Vec<Work>, Database)> {
        self.machine.sh("touch /run/soak/end")?;
        let mut all = Vec::new();
        for (name, work) in self.running {
            let output = work.wait(ENDS_WITHIN)?;
            all.push(done(name, &output.stdout).ok_or_else(|| {
                let said = format!("{name} did not say what it did: {}{}", output.stdout, output.stderr);
                self.machine.blame(Error::Unhealthy(said))
            })?);
        }
        Ok((all, database(self.machine, self.history_before)?))
    }

    /// Returns the failed rounds, in their own words.
    #[must_use]
    pub fn failures(machine: &Machine) -> String {
        machine.sh("tail -n 20 /run/soak/*.failed 2>/dev/null; true").unwrap_or_default()
    }
}

/// Returns the additional work of a machine with a network card.
fn through_network_card(echo_port: u16) -> (&'static str, String) {
    (
        "network card: blocks of 32 KiB sent to the host and back, compared",
        format!("python3 /run/soak/network {echo_port}"),
    )
}

/// Returns each kind of work: its name and its command line.
fn commands(round: u64) -> [(&'static str, String); 6] {
    let stressors = "--cpu 1 --vm 1 --vm-bytes 32M --fork 1 --pipe 1 --timer 1 --fault 1 --memcpy 1";
    let again = "/run/soak/again";
    [
        ("PostgreSQL: rounds of pgbench", format!("{again} database pgbench -n -c 2 -j 1 -T {round} bench")),
        (
            "stress-ng --verify: rounds of seven stressors",
            format!("nice -n 10 {again} stress stress-ng --quiet {stressors} --verify -t {round}"),
        ),
        (
            "iperf3 over the loopback: rounds",
            format!("nice -n 5 {again} loopback iperf3 -c 127.0.0.1 -b 40M -t {round}"),
        ),
        (
            "disk: rounds of 2 MiB written, copied, read back and compared",
            format!("{again} disk /run/soak/disk"),
        ),
        (
            "primes and hashes with known results: rounds",
            "nice -n 19 mercury-workload --until-file /run/soak/end compute".to_owned(),
        ),
        (
            "patterns in x87, SSE and AVX registers: rounds",
            "nice -n 19 mercury-workload --until-file /run/soak/end fpu".to_owned(),
        ),
    ]
}

/// Reads the final report of one kind of work.
pub(super) fn done(name: &'static str, output: &str) -> Option<Work> {
    let report: Value = serde_json::from_str(output.lines().last()?).ok()?;
    Some(Work { name, passes: report["passes"].as_u64()?, violations: report["violations"].as_u64()? })
}

fn database(machine: &Machine, history_before: u64) -> Result<Database> {
    const AGREE: &str = "select ((select sum(abalance) from pgbench_accounts) = sum(delta) \
        and (select sum(bbalance) from pgbench_branches) = sum(delta) \
        and (select sum(tbalance) from pgbench_tellers) = sum(delta))::int from pgbench_history";
    let reports = machine.sh("cat /run/soak/database.log")?;
    Ok(Database {
        acknowledged: sum(&reports, "actually processed: "),
        failed: sum(&reports, "failed transactions: "),
        found: number(machine, "select count(*) from pgbench_history")? - history_before,
        balances_agree: number(machine, AGREE)? == 1,
    })
}

/// Returns the answer of a query.
fn number(machine: &Machine, query: &str) -> Result<u64> {
    let answer = machine.program(&["psql", "-At", "-c", query, "bench"]).run()?.check()?.stdout;
    answer.trim().parse().map_err(|_| Error::Host(format!("`{query}` returned {answer}")))
}

/// Returns the sum of the numbers after a label.
fn sum(reports: &str, label: &str) -> u64 {
    let after_label = reports.lines().filter_map(|line| line.split_once(label));
    after_label.filter_map(|(_, rest)| rest.split([' ', '/']).next()?.parse::<u64>().ok()).sum()
}

/// Starts a server that echoes to one client. Returns its port.
fn echo_server() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context(|| "open a port for the machine".into())?;
    let port = listener.local_addr().context(|| "open a port for the machine".into())?.port();
    thread::spawn(move || listener.accept().map(|(client, _)| echo(client)));
    Ok(port)
}

fn echo(mut client: TcpStream) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = client.read(&mut buffer) {
        if client.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REPORTS: &str = "number of transactions actually processed: 138\n\
        number of failed transactions: 0 (0.000%)\n\
        number of transactions actually processed: 1004/1004\nnumber of failed transactions: 3 (1.0%)\n";

    #[test]
    fn reports_are_added_up() {
        assert_eq!(sum(REPORTS, "actually processed: "), 1142);
        assert_eq!(sum(REPORTS, "failed transactions: "), 3);
    }

    #[test]
    fn the_last_line_says_what_was_done() {
        let work = done("disk", "noise\n{\"passes\":7,\"violations\":1}\n").unwrap();
        assert_eq!((work.passes, work.violations), (7, 1));
        assert!(done("disk", "Traceback").is_none());
    }

    #[test]
    fn an_echo_comes_back() {
        let mut client = TcpStream::connect(("127.0.0.1", echo_server().unwrap())).unwrap();
        client.write_all(b"there and back").unwrap();
        let mut back = [0; 14];
        client.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"there and back");
    }
}
