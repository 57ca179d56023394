//! Payments between accounts in a machine's PostgreSQL, ordered by clients on another machine. Each
//! payment that a client was told is committed must be in the database, exactly once.

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    machine::Machine,
};

/// The tables: accounts with 1000 each, and the payments. No constraint prevents a payment from
/// being recorded twice.
const LEDGER: &str = "create table account (id int primary key, balance bigint not null); \
    insert into account select id, 1000 from generate_series(0, 19) id; \
    create table done (client int, seq int, source int, target int, amount bigint)";
const TOTAL: &str = "20000";

/// Starts PostgreSQL with an empty ledger and pgbench's tables, open to the network of 10.9.0.
///
/// # Errors
/// If PostgreSQL does not start.
pub fn serve(machine: &Machine) -> Result<()> {
    machine.sh("cd /etc/postgresql/*/main && echo \"listen_addresses = '*'\" >> postgresql.conf && \
         echo 'host all all 10.9.0.0/24 trust' >> pg_hba.conf")?;
    machine.start_postgres()?;
    machine.sh(&format!("psql -q bench -c '{LEDGER}'")).map(drop)
}

/// The comparison of a ledger with the commits that its clients were told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Transactions that clients were told are committed.
    pub acknowledged: u64,
    /// Acknowledged transactions that the database does not have.
    pub lost: u64,
    /// Transactions that the database has more than once.
    pub doubled: u64,
    /// Transactions in the database that no client was told of.
    pub unheard: u64,
    /// Accounts whose balance differs from the sum of their transactions.
    pub wrong_accounts: u64,
    /// True if the sum of all accounts has not changed.
    pub sum_is_right: bool,
}

impl Ledger {
    /// Compares the ledger with `acknowledged`: the number of acknowledged transactions of each
    /// client, by the client's number. All clients must have ended.
    ///
    /// # Errors
    /// If the database does not answer.
    pub fn of(machine: &Machine, acknowledged: &[u64]) -> Result<Self> {
        let mut ledger = Self::default();
        for (client, &told) in acknowledged.iter().enumerate() {
            let [rows, different, heard] = counts(machine, client, told)?;
            ledger.add(told, rows, different, heard);
        }
        let wrong = "select count(*) from account where balance != 1000 \
                - coalesce((select sum(amount) from done where source = id), 0) \
                + coalesce((select sum(amount) from done where target = id), 0)";
        ledger.wrong_accounts = number(&ask(machine, wrong)?)?;
        ledger.sum_is_right = ask(machine, "select sum(balance) from account")? == TOTAL;
        Ok(ledger)
    }

    /// Adds one client: its acknowledged transactions, its rows in the database, the different
    /// transactions among these rows, and those of them that the client was told of.
    fn add(&mut self, told: u64, rows: u64, different: u64, heard: u64) {
        self.acknowledged += told;
        self.lost += told - heard;
        self.doubled += rows - different;
        self.unheard += different - heard;
    }

    /// Returns true if the database has every acknowledged transaction once, and no other.
    #[must_use]
    pub fn is_right(&self) -> bool {
        let wrong = self.lost + self.doubled + self.unheard + self.wrong_accounts;
        self.acknowledged > 0 && wrong == 0 && self.sum_is_right
    }
}

fn counts(machine: &Machine, client: usize, told: u64) -> Result<[u64; 3]> {
    let query = format!(
        "select count(*), count(distinct seq), count(distinct seq) filter (where seq < {told}) \
         from done where client = {client}"
    );
    let answer = ask(machine, &query)?;
    let numbers = answer.split('|').map(number).collect::<Result<Vec<_>>>()?;
    numbers.try_into().map_err(|_| Error::Host(format!("`{query}` returned {answer}")))
}

fn ask(machine: &Machine, query: &str) -> Result<String> {
    machine.sh(&format!("psql -At bench -c '{query}'"))
}

fn number(text: &str) -> Result<u64> {
    text.trim().parse().map_err(|_| Error::Host(format!("the database counts `{text}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(told: u64, rows: u64, different: u64, heard: u64) -> Ledger {
        let mut ledger = Ledger { sum_is_right: true, ..Ledger::default() };
        ledger.add(10, 10, 10, 10);
        ledger.add(told, rows, different, heard);
        ledger
    }

    #[test]
    fn a_ledger_with_each_entry_once_is_right() {
        assert!(of(5, 5, 5, 5).is_right());
        assert!(!Ledger { sum_is_right: false, ..of(5, 5, 5, 5) }.is_right());
        assert!(!Ledger { wrong_accounts: 2, ..of(5, 5, 5, 5) }.is_right());
        assert!(!Ledger { sum_is_right: true, ..Ledger::default() }.is_right(), "nothing was done");
    }

    #[test]
    fn lost_doubled_and_unheard_entries_are_told_apart() {
        let [lost, doubled, unheard] = [of(5, 4, 4, 4), of(5, 6, 5, 5), of(5, 6, 6, 5)];
        assert_eq!((lost.lost, lost.doubled, lost.unheard), (1, 0, 0));
        assert_eq!((doubled.lost, doubled.doubled, doubled.unheard), (0, 1, 0));
        assert_eq!((unheard.lost, unheard.doubled, unheard.unheard), (0, 0, 1));
        assert!([lost, doubled, unheard].iter().all(|ledger| !ledger.is_right()));
    }
}
