//! `make demo-move`: a machine with PostgreSQL moves to another one and back, with its clients connected from
//! outside.

use super::{Check, conclude, table, try_next};
use crate::soak::migration::{Plan, Record, run as soak};
use mercury_lab::{error::Result, kernel::Kernel, markdown::thousands};

const PLAN: Plan = Plan { kernel: Kernel::BookwormCloud, cpus: 2, memory_mib: 512, moves: 2, time: None };

/// Shows the demonstration.
///
/// # Errors
/// If a machine cannot be booted, a move fails, a connection breaks, or a transaction is lost or done twice.
pub(super) fn run() -> Result<()> {
    let (record, _) = soak(PLAN)?.keep()?;
    print(&record);
    verdict(&record)
}

fn print(record: &Record) {
    let mut table = table(&[
        "move",
        "rounds",
        "sent, MiB",
        "all of it, s",
        "stood still, s",
        "longest wait of a client, s",
    ]);
    for (number, one) in (1..).zip(&record.moves) {
        table.add_row([
            number.to_string(),
            one.rounds.to_string(),
            (one.sent_bytes >> 20).to_string(),
            format!("{:.1}", one.seconds),
            format!("{:.1}", one.downtime_ms as f64 / 1e3),
            format!("{:.1}", one.silence_ms as f64 / 1e3),
        ]);
    }
    println!("\nEach move, by the machine's own account and by its clients':\n\n{table}");
    println!(
        "\nThree emulated machines share this host: `lab bench migration` compares with QEMU's own migration."
    );
}

/// # Errors
/// If anything was lost, done twice or broken, or a move was not made.
fn verdict(record: &Record) -> Result<()> {
    let (ledger, pgbench) = (record.ledger.unwrap_or_default(), record.pgbench.unwrap_or_default());
    let told = ledger.acknowledged + pgbench.acknowledged;
    let checks = [
        Check::new(
            record.moves.len() as u64 == record.planned && record.planned > 0,
            format!("moves made: {} of {}", record.moves.len(), record.planned),
        ),
        Check::new(record.broken_connections == 0, "every client kept its one connection throughout"),
        Check::new(
            told > 0,
            format!("transactions that clients were told are committed: {}", thousands(told)),
        ),
        Check::new(
            ledger.lost == 0 && pgbench.found >= pgbench.acknowledged && pgbench.failed == 0,
            "none of them lost or failed",
        ),
        Check::new(ledger.doubled == 0 && pgbench.found <= pgbench.acknowledged, "none of them done twice"),
        Check::new(
            ledger.wrong_accounts == 0 && ledger.sum_is_right && pgbench.balances_agree,
            "all balances are what the transactions make of them",
        ),
    ];
    conclude(&checks, record.failure.as_deref())?;
    record.check()?;
    try_next(&[
        ("make pair", "by hand: move the shell that you type into to another machine and back"),
        ("make demo-checkpoint", "the whole machine into an image, power off, and brought back elsewhere"),
        ("docs/migration.md", "how to do it with your own machines"),
    ]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::migration::{Move, Pgbench};
    use mercury_lab::ledger::Ledger;

    fn record() -> Record {
        Record {
            planned: 1,
            moves: vec![Move::default()],
            ledger: Some(Ledger { acknowledged: 5, sum_is_right: true, ..Ledger::default() }),
            pgbench: Some(Pgbench { acknowledged: 9, failed: 0, found: 9, balances_agree: true }),
            ..Record::default()
        }
    }

    #[test]
    fn any_wrong_record_breaks_a_promise() {
        assert!(verdict(&record()).is_ok());
        let (ledger, pgbench) = (record().ledger.unwrap_or_default(), record().pgbench.unwrap_or_default());
        let wrong = [
            Record { planned: 2, ..record() },
            Record { broken_connections: 1, ..record() },
            Record { ledger: Some(Ledger { lost: 1, ..ledger }), ..record() },
            Record { ledger: Some(Ledger { doubled: 1, ..ledger }), ..record() },
            Record { ledger: Some(Ledger { wrong_accounts: 1, ..ledger }), ..record() },
            Record { pgbench: Some(Pgbench { found: 8, ..pgbench }), ..record() },
            Record { pgbench: Some(Pgbench { found: 10, ..pgbench }), ..record() },
            Record { pgbench: Some(Pgbench { failed: 1, ..pgbench }), ..record() },
            Record { failure: Some("it broke".into()), ..record() },
        ];
        assert!(wrong.iter().all(|record| verdict(record).is_err()));
    }
}
