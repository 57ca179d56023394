//! Money that goes from account to account in a machine's PostgreSQL, on the orders of clients on another machine: what
//! they were told is done must be there, once.

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    machine::Machine,
};

/// Accounts with 1000 each, and what was done with them. Nothing keeps anything from being done twice.
const LEDGER: &str = "create table account (id int primary key, balance bigint not null); \
    insert into account select id, 1000 from generate_series(0, 19) id; \
    create table done (client int, seq int, source int, target int, amount bigint)";
const TOTAL: &str = "20000";

/// PostgreSQL with an empty ledger and pgbench's tables, for whoever is on the network of 10.9.0.
///
/// # Errors
/// If it does not start.
pub fn serve(machine: &Machine) -> Result<()> {
    machine.sh("cd /etc/postgresql/*/main && echo \"listen_addresses = '*'\" >> postgresql.conf && \
         echo 'host all all 10.9.0.0/24 trust' >> pg_hba.conf")?;
    machine.start_postgres()?;
    machine.sh(&format!("psql -q bench -c '{LEDGER}'")).map(drop)
}

/// How a ledger compares with what its clients were told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Transactions that clients were told are committed.
    pub acknowledged: u64,
    /// Those of them that are not there.
    pub lost: u64,
    /// What is there more than once.
    pub doubled: u64,
    /// What is there, and nobody was told so.
    pub unheard: u64,
    /// Accounts whose balance is not what the transactions make of it.
    pub wrong_accounts: u64,
    /// Whether the sum of all accounts is what it was in the beginning.
    pub sum_is_right: bool,
}

impl Ledger {
    /// Compares; `acknowledged` has for each client, by its number, how many transactions it was told are committed. All
    /// clients have ended.
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

    /// One client's: rows that are there, different transactions among them, and those of these that it was told of.
    fn add(&mut self, told: u64, rows: u64, different: u64, heard: u64) {
        self.acknowledged += told;
        self.lost += told - heard;
        self.doubled += rows - different;
        self.unheard += different - heard;
    }

    /// Whether all that was acknowledged is there, once, and nothing else is.
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
    numbers.try_into().map_err(|_| Error::Host(format!("`{query}` gave {answer}")))
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
    fn what_is_there_once_is_right() {
        assert!(of(5, 5, 5, 5).is_right());
        assert!(!Ledger { sum_is_right: false, ..of(5, 5, 5, 5) }.is_right());
        assert!(!Ledger { wrong_accounts: 2, ..of(5, 5, 5, 5) }.is_right());
        assert!(!Ledger { sum_is_right: true, ..Ledger::default() }.is_right(), "nothing was done");
    }

    #[test]
    fn what_is_missing_twice_or_unheard_is_told_apart() {
        let [lost, doubled, unheard] = [of(5, 4, 4, 4), of(5, 6, 5, 5), of(5, 6, 6, 5)];
        assert_eq!((lost.lost, lost.doubled, lost.unheard), (1, 0, 0));
        assert_eq!((doubled.lost, doubled.doubled, doubled.unheard), (0, 1, 0));
        assert_eq!((unheard.lost, unheard.doubled, unheard.unheard), (0, 0, 1));
        assert!([lost, doubled, unheard].iter().all(|ledger| !ledger.is_right()));
    }
}
