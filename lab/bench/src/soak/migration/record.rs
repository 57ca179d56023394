//! The records of moves with PostgreSQL, kept run by run, and the page about all runs.

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::Plan;
use crate::migration::Move as Said;
use mercury_lab::{
    error::{Context, Error, Result},
    ledger::Ledger,
    markdown::{table, thousands},
    paths,
};

/// The directory of the records under `target/lab/`, until they become a page.
const KEPT: &str = "soak-migration";

/// The record of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// The end of the run, in seconds since 1970.
    pub ended: u64,
    /// The kernel that moved.
    pub kernel: String,
    pub cpus: u32,
    pub memory_mib: u32,
    /// Moves that were planned.
    pub planned: u64,
    /// Moves that were made.
    pub moves: Vec<Move>,
    /// The comparison of the ledger with the answers that its clients got.
    pub ledger: Option<Ledger>,
    /// The same comparison for pgbench.
    pub pgbench: Option<Pgbench>,
    pub broken_connections: u64,
    /// The length of the run in wall time.
    pub minutes: f64,
    /// The failure that ended the run.
    pub failure: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Move {
    /// Rounds while the machine ran.
    pub rounds: u64,
    /// The time for which applications stood still, as the mover reports it.
    pub downtime_ms: u64,
    /// The longest wait of a client for a transaction during the move.
    pub silence_ms: u64,
    /// The time of the whole move, as the mover reports it.
    pub seconds: f64,
    pub sent_bytes: u64,
}

impl Move {
    /// Reads a move from the machine's last words.
    #[must_use]
    pub(super) fn of(said: &Said) -> Self {
        Self {
            rounds: said.rounds,
            downtime_ms: (said.downtime_seconds * 1e3) as u64,
            silence_ms: 0,
            seconds: said.total_seconds,
            sent_bytes: said.sent_bytes,
        }
    }

    /// Describes the move in one line for people.
    pub(super) fn text(&self) -> String {
        format!(
            "{} rounds, {} MiB sent in {:.1} s; applications stood still for {:.1} s; \
             the longest wait of a client was {:.1} s",
            self.rounds,
            self.sent_bytes >> 20,
            self.seconds,
            self.downtime_ms as f64 / 1e3,
            self.silence_ms as f64 / 1e3,
        )
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pgbench {
    /// Transactions that pgbench was told are committed.
    pub acknowledged: u64,
    /// Transactions that pgbench was told have failed.
    pub failed: u64,
    /// Transactions in the history table.
    pub found: u64,
    /// True if the balances of accounts, tellers and branches agree with that table.
    pub balances_agree: bool,
}

/// The sums of one run, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    pub moves: u64,
    /// Transactions that clients outside were told are committed.
    pub transactions: u64,
    /// Committed transactions that the database lacks.
    pub lost_transactions: u64,
    /// Transactions that were made twice.
    pub doubled_transactions: u64,
    /// Transactions that pgbench was told have failed.
    pub failed_transactions: u64,
    pub broken_connections: u64,
    /// The longest time in which a client had no answer.
    pub longest_silence_ms: u64,
    /// Runs that ended early or with a wrong result.
    pub failures: u64,
}

impl Totals {
    fn of(records: &[&Record]) -> Self {
        let mut totals = Self::default();
        for record in records {
            let ledger = record.ledger.unwrap_or_default();
            let pgbench = record.pgbench.unwrap_or_default();
            totals.moves += record.moves.len() as u64;
            totals.transactions += ledger.acknowledged + pgbench.acknowledged;
            totals.lost_transactions += ledger.lost + pgbench.acknowledged.saturating_sub(pgbench.found);
            totals.doubled_transactions +=
                ledger.doubled + pgbench.found.saturating_sub(pgbench.acknowledged);
            totals.failed_transactions += pgbench.failed;
            totals.broken_connections += record.broken_connections;
            let silence = record.moves.iter().map(|one| one.silence_ms).max();
            totals.longest_silence_ms = totals.longest_silence_ms.max(silence.unwrap_or(0));
            totals.failures += u64::from(record.check().is_err());
        }
        totals
    }
}

impl Record {
    pub(super) fn new(plan: Plan) -> Self {
        Self {
            kernel: plan.kernel.to_string(),
            cpus: plan.cpus,
            memory_mib: plan.memory_mib,
            planned: plan.moves,
            ..Self::default()
        }
    }

    /// Checks that all moves were made, and nothing was lost, done twice or broken.
    ///
    /// # Errors
    /// With the failures.
    pub fn check(&self) -> Result<()> {
        if let Some(failure) = &self.failure {
            let made = self.moves.len();
            return Err(Error::Unhealthy(format!("after {made} of {} moves: {failure}", self.planned)));
        }
        let ledger = self.ledger.is_some_and(|ledger| ledger.is_right());
        let pgbench = self.pgbench.is_some_and(|pgbench| {
            pgbench.acknowledged > 0
                && pgbench.acknowledged == pgbench.found
                && pgbench.failed == 0
                && pgbench.balances_agree
        });
        if ledger && pgbench && self.broken_connections == 0 && self.moves.len() as u64 == self.planned {
            return Ok(());
        }
        Err(Error::Unhealthy(format!("the ledger is not right: {self:?}")))
    }

    /// Writes the record to a file, from which a page can be made. Returns the same text.
    pub(crate) fn keep(mut self) -> Result<(Self, String)> {
        self.ended = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let json = pretty(&self)?;
        let path = paths::lab_dir(KEPT)?.join(format!("{}.json", self.ended));
        fs::write(&path, &json).context(|| format!("write {}", path.display()))?;
        Ok((self, json))
    }

    fn row(&self) -> Vec<String> {
        let totals = Totals::of(&[self]);
        let mut downtimes: Vec<u64> = self.moves.iter().map(|one| one.downtime_ms).collect();
        downtimes.sort_unstable();
        let seconds = |ms: u64| format!("{:.1}", ms as f64 / 1e3);
        vec![
            self.kernel.clone(),
            self.cpus.to_string(),
            totals.moves.to_string(),
            thousands(totals.transactions),
            totals.lost_transactions.to_string(),
            totals.doubled_transactions.to_string(),
            totals.failed_transactions.to_string(),
            totals.broken_connections.to_string(),
            downtimes.get(downtimes.len() / 2).map_or_else(String::new, |&ms| seconds(ms)),
            seconds(totals.longest_silence_ms),
            if totals.failures > 0 { "**NO**" } else { "yes" }.to_owned(),
        ]
    }
}

const HEADER: [&str; 11] = [
    "kernel",
    "CPUs",
    "moves",
    "transactions",
    "lost",
    "done twice",
    "failed",
    "connections broken",
    "stood still, s",
    "longest silence, s",
    "all was right",
];

/// Returns a table with a line for each run.
#[must_use]
pub(super) fn table_of(records: &[&Record]) -> String {
    table(&HEADER, &records.iter().map(|record| record.row()).collect::<Vec<_>>())
}

/// Writes the page from all runs that were kept.
pub(super) fn write_page() -> Result<()> {
    let records = kept()?;
    let all: Vec<&Record> = records.iter().collect();
    if all.is_empty() {
        return Err(Error::Host("there are no records: run `lab soak --migration` first".into()));
    }
    let path = paths::root().join("docs/soak-migration.md");
    fs::write(&path, page(&all)).context(|| format!("write {}", path.display()))?;
    println!("written: {}", path.display());
    crate::add_soak(&pretty(&Totals::of(&all))?)
}

fn kept() -> Result<Vec<Record>> {
    let dir = paths::lab_dir(KEPT)?;
    let entries = fs::read_dir(&dir).context(|| format!("read {}", dir.display()))?;
    let mut records = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let text = fs::read_to_string(&path).context(|| format!("read {}", path.display()))?;
        let record: Record = serde_json::from_str(&text)
            .map_err(|error| Error::Host(format!("{} is no record: {error}", path.display())))?;
        records.push(record);
    }
    records.sort_by_key(|record| record.ended);
    Ok(records)
}

fn pretty(what: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(what).map_err(|error| Error::Host(error.to_string()))
}

fn page(records: &[&Record]) -> String {
    let totals = Totals::of(records);
    let lines: Vec<String> = records.iter().map(|record| command_line(record)).collect();
    let failures = records.iter().filter_map(|record| {
        let first = record.check().err()?.to_string().lines().next()?.to_owned();
        Some(format!("- {} on {} CPUs, {first}\n", record.kernel, record.cpus))
    });
    let failures: String = failures.collect();
    let failures =
        if failures.is_empty() { String::new() } else { format!("\n## What failed\n\n{failures}") };
    format!(
        "# {} moves with PostgreSQL, there and back\n\n\
        `cargo run -p mercury-lab-bench -- soak --migration --page` wrote this page, of these runs:\n\n{}\n\
        Each run has three machines, emulated in software: one with PostgreSQL, a destination, \
        and a third one. The\n\
        third machine has the files of both (NFS), is the switch between them, and runs the clients. \
        The first machine\n\
        moved to the destination by `mercury migrate` while they worked, and was switched off. \
        It was switched on\n\
        again as the next destination, with its own card, and the machine moved back, and so on. \
        All runs took {:.0}\n\
        minutes of wall time.\n\n\
        Two clients keep a ledger. Each transaction has its number, and those that a client was told are \
        committed\n\
        must be in the tables exactly once. Four clients are pgbench's. \
        pgbench gives a client up when its connection\n\
        breaks. It must have been told of as many commits as the history has, \
        and all balances must agree with the\n\
        history. One more connection, on which every word must come back, lasts through all moves. \
        Each client has one\n\
        connection from the first move to the last.\n\n{}\n\
        \"Stood still\" is the median time, as the mover reports it. \
        \"Silence\" is the longest time for which one of the\n\
        ledger's clients waited for an answer, over all moves. Both are times of an emulator, \
        whose host's two\n\
        processors had all machines and other jobs to run.\nAll in all: **{} transactions, {} lost, \
        {} done twice, {} connections broken**.\n{failures}",
        totals.moves,
        lines.concat(),
        records.iter().map(|record| record.minutes).sum::<f64>(),
        table_of(records),
        thousands(totals.transactions),
        totals.lost_transactions,
        totals.doubled_transactions,
        totals.broken_connections,
    )
}

fn command_line(record: &Record) -> String {
    let kernel = if record.kernel.starts_with("6.1.") { "bookworm-cloud" } else { "trixie-cloud" };
    format!(
        "- `soak --migration --moves {} --cpus {} --memory {} --kernel {kernel}`\n",
        record.planned, record.cpus, record.memory_mib
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns a record without errors.
    fn record() -> Record {
        let one = Move { rounds: 2, downtime_ms: 4000, silence_ms: 5500, seconds: 30.0, sent_bytes: 9 };
        let ledger = Ledger { acknowledged: 100, sum_is_right: true, ..Ledger::default() };
        let pgbench = Pgbench { acknowledged: 900, failed: 0, found: 900, balances_agree: true };
        Record {
            kernel: "6.1.0".into(),
            cpus: 2,
            planned: 2,
            moves: vec![one, Move { silence_ms: 7100, ..one }],
            ledger: Some(ledger),
            pgbench: Some(pgbench),
            ..Record::default()
        }
    }

    #[test]
    fn any_wrong_record_fails_the_check() {
        assert!(record().check().is_ok());
        let pgbench = record().pgbench.unwrap();
        let ledger = record().ledger.unwrap();
        let wrong = [
            Record { planned: 3, ..record() },
            Record { broken_connections: 1, ..record() },
            Record { failure: Some("it broke".into()), ..record() },
            Record { ledger: None, ..record() },
            Record { ledger: Some(Ledger { lost: 1, ..ledger }), ..record() },
            Record { pgbench: None, ..record() },
            Record { pgbench: Some(Pgbench { found: 899, ..pgbench }), ..record() },
            Record { pgbench: Some(Pgbench { failed: 1, ..pgbench }), ..record() },
            Record { pgbench: Some(Pgbench { balances_agree: false, ..pgbench }), ..record() },
        ];
        assert!(wrong.iter().all(|record| record.check().is_err()), "{wrong:?}");
    }

    #[test]
    fn runs_are_added_up() {
        let lost = Record {
            pgbench: Some(Pgbench { found: 898, ..record().pgbench.unwrap() }),
            broken_connections: 1,
            ..record()
        };
        let totals = Totals::of(&[&record(), &lost]);
        assert_eq!((totals.moves, totals.transactions, totals.longest_silence_ms), (4, 2000, 7100));
        assert_eq!((totals.lost_transactions, totals.doubled_transactions), (2, 0));
        assert_eq!((totals.broken_connections, totals.failures), (1, 1));
    }

    #[test]
    fn a_page_says_what_failed() {
        let failed = Record { failure: Some("it broke\nin detail".into()), ..record() };
        let page = page(&[&record(), &failed]);
        assert!(page.contains("# 4 moves") && page.contains("**2,000 transactions, 0 lost"), "{page}");
        assert!(page.contains("## What failed") && page.contains("2 of 2 moves: it broke\n"), "{page}");
        assert!(!self::page(&[&record()]).contains("What failed"));
    }

    #[test]
    fn a_record_is_read_back() {
        let json = pretty(&record()).unwrap();
        let read: Record = serde_json::from_str(&json).unwrap();
        assert_eq!(read.moves.len(), 2);
        assert_eq!(Totals::of(&[&read]), Totals::of(&[&record()]));
    }
}
