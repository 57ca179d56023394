//! `make demo-checkpoint`: a machine with PostgreSQL at work goes into an image, is powered off, and is
//! brought back in a fresh machine.
//!
//! The image lies on a disk of its own. With `--poweroff` nothing is written to the other disks after the
//! instant, so that memory and disks still fit each other. The second machine is a new emulator with the same
//! disks: its memory is empty, and its devices are as after a reset.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    Check, conclude,
    database::{self, balances_agree},
    table, try_next,
};
use mercury_lab::{
    command::patient,
    error::{Error, Result, wait_for},
    kernel::Kernel,
    live::{Line, say},
    machine::Machine,
    markdown::thousands,
    progress, restart,
    restart::{boot_id, check_chain, count, script},
    spec::{Bus, Platform, Qemu, Spec},
};

const CPUS: u32 = 2;
const MEMORY_MIB: u32 = 768;
const DISK: &str = "/dev/vda";
const DISK_MIB: u32 = 2048;
/// Time for which the database works before the checkpoint, and after the restore.
const AT_WORK: Duration = Duration::from_secs(6);
/// Limit for the machine to be off after the command was given.
const OFF_WITHIN: Duration = Duration::from_secs(240);
/// Clients that run until they are told to end. Their output goes into a file, since the agent's
/// stream does not outlive the emulator.
const PGBENCH: &str =
    "setsid pgbench -n -c 4 -j 2 -P 1 -T 86400 bench > /run/pgbench 2>&1 < /dev/null & echo $!";
const SIGALRM: &str = "ALRM";

/// The observations of the demonstration.
#[derive(Debug, Default)]
struct Seen {
    boot_before: String,
    boot_after: String,
    pgbench_before: String,
    pgbench_after: String,
    transactions_before: u64,
    transactions_after: u64,
    links_before: u64,
    off_after: Duration,
    back_after: Duration,
    image_mib: u64,
    report: Option<database::Measured>,
    balances_agree: bool,
    chain: Option<String>,
    mode: String,
    complaint: Option<String>,
}

/// Shows the demonstration.
///
/// # Errors
/// If the machine cannot be booted or brought back, or anything was lost, wrong or complained about.
pub(super) fn run() -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "Bochs has no disk for the image" });
    }
    say("A machine with stock Debian 12: building what is missing, then booting it");
    let spec = Spec::new(Kernel::BookwormCloud).cpus(CPUS).memory_mib(MEMORY_MIB);
    let spec = spec.disk(Bus::Virtio, DISK_MIB).qemu_version(Qemu::Newer);
    let machine = Machine::boot(spec)?;
    let mut seen = Seen::default();
    let machine = watch(machine, &mut seen)?;
    machine.shut_down()?;
    print(&seen);
    verdict(&seen)
}

/// Runs all steps. Returns the machine that was brought back.
fn watch(machine: Machine, seen: &mut Seen) -> Result<Machine> {
    progress::step("starting PostgreSQL", || machine.start_postgres())?;
    restart::start(&machine, "clock", script::CLOCK, "")?;
    restart::start(&machine, "chain", script::CHAIN, "")?;
    say("mercury restore --prepare: what a boot loader will start to bring the machine back");
    let (boot, _folder) = restart::prepare(&machine, DISK, "--module $MERCURY_MODULE")?;
    println!("    kernel and initial RAM disk are kept outside of the machine");

    say("PostgreSQL with four clients, and a chain of hashes");
    let pid = machine.sh(PGBENCH)?;
    work(&machine, AT_WORK)?;
    seen.boot_before = boot_id(&machine)?;
    seen.pgbench_before = identity(&machine, &pid)?;

    say(&format!("mercury checkpoint --poweroff {DISK}: the whole machine into an image"));
    seen.transactions_before = transactions(&machine)?;
    seen.links_before = count(&machine, "chain")?;
    seen.off_after = write_image(&machine)?;
    println!("    the machine is off after {:.0} s", seen.off_after.as_secs_f32());

    say("A fresh machine, with the same disks and empty memory, restores it");
    let begun = Instant::now();
    let machine =
        progress::step("reading the image, and resuming the machine", || machine.start_other(&boot))?;
    seen.back_after = begun.elapsed();
    seen.mode = machine.mercury("status")?["state"].as_str().unwrap_or("?").to_owned();
    println!("    PostgreSQL and its clients go on after {:.0} s", seen.back_after.as_secs_f32());
    work(&machine, AT_WORK)?;
    seen.boot_after = boot_id(&machine)?;
    seen.pgbench_after = identity(&machine, &pid)?;
    finish(&machine, &pid, seen)?;
    Ok(machine)
}

/// Ends the clients and the chain, and compares their reports with the database.
fn finish(machine: &Machine, pid: &str, seen: &mut Seen) -> Result<()> {
    machine.sh(&format!("kill -s {SIGALRM} {pid}; tail --pid={pid} -f /dev/null"))?;
    seen.report = Some(database::result(&machine.sh("cat /run/pgbench")?)?);
    seen.transactions_after = transactions(machine)?;
    seen.balances_agree = balances_agree(machine)?;
    seen.chain = restart::results(machine, &["chain"])?.into_iter().next();
    let image = machine.sh(&format!("mercury --json inspect {DISK}"))?;
    seen.image_mib = image_bytes(&image) >> 20;
    seen.complaint = machine.check_health().err().map(|error| error.to_string());
    Ok(())
}

fn image_bytes(json: &str) -> u64 {
    let value: serde_json::Value = serde_json::from_str(json).unwrap_or_default();
    value["bytes"].as_u64().unwrap_or(0)
}

/// Runs the command, shows its output, and waits until the machine is off. Returns the time.
fn write_image(machine: &Machine) -> Result<Duration> {
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    let begun = Instant::now();
    let mut command = machine.spawn(&format!("mercury checkpoint --poweroff {DISK}"))?;
    let mut line = Line::begin();
    wait_for("the machine to be off", patient(OFF_WITHIN), || {
        // The machine may be off between any two of these lines, which is no failure.
        let said = command.errors_so_far().unwrap_or_default();
        if let Some(last) = said.lines().rev().find(|line| !line.trim().is_empty()) {
            line.show(last.trim());
        }
        Ok(machine.is_off()?.then_some(()))
    })?;
    machine.forgive();
    Ok(begun.elapsed())
}

/// Lets the machine work for a while, and shows the progress.
fn work(machine: &Machine, time: Duration) -> Result<()> {
    let mut line = Line::begin();
    while line.elapsed() < time {
        thread::sleep(Duration::from_millis(500));
        let output = machine.sh("tail -n 2 /run/pgbench")?;
        if let Some(progress) = database::progress(&output) {
            line.show(&format!("{progress}; {} hashes", thousands(count(machine, "chain")?)));
        }
    }
    Ok(())
}

/// Returns a process's number and its start in ticks since boot. Another process cannot have both.
fn identity(machine: &Machine, pid: &str) -> Result<String> {
    machine.sh(&format!("cut -d' ' -f 1,22 /proc/{pid}/stat"))
}

/// Returns the number of pgbench's transactions in the database.
fn transactions(machine: &Machine) -> Result<u64> {
    let text = machine.sh("psql -At bench -c 'select count(*) from pgbench_history'")?;
    text.trim().parse().map_err(|_| Error::Host(format!("pgbench's history has `{text}` rows")))
}

fn print(seen: &Seen) {
    let links = |seen: &Seen| {
        let ended = seen.chain.as_deref().and_then(|chain| chain.split(' ').next()?.parse().ok());
        thousands(ended.unwrap_or(0))
    };
    let mut table = table(&["", "before the power off", "in the fresh machine"]);
    let short = |id: &str| id.chars().take(13).collect::<String>();
    table.add_row(["boot of its kernel".to_owned(), short(&seen.boot_before), short(&seen.boot_after)]);
    table.add_row([
        "pgbench: process, start".to_owned(),
        seen.pgbench_before.clone(),
        seen.pgbench_after.clone(),
    ]);
    table.add_row([
        "transactions in the database".to_owned(),
        thousands(seen.transactions_before),
        thousands(seen.transactions_after),
    ]);
    table.add_row(["hashes in the chain".to_owned(), thousands(seen.links_before), links(seen)]);
    println!("\n{table}");
    println!(
        "\n{MEMORY_MIB} MiB of memory became an image of {} MiB. Written and off after {:.0} s, \
         back after {:.0} s,",
        seen.image_mib,
        seen.off_after.as_secs_f32(),
        seen.back_after.as_secs_f32()
    );
    println!(
        "in an emulator on a shared host; the emulator starts, and reads the image, in the second time."
    );
}

/// # Errors
/// If anything was lost, wrong or complained about.
fn verdict(seen: &Seen) -> Result<()> {
    let failed = seen.report.map_or(1, |report| report.failed);
    let checks = [
        Check::new(seen.boot_before == seen.boot_after, "the kernel has not booted again"),
        Check::new(seen.pgbench_before == seen.pgbench_after, "the clients are the same processes"),
        Check::new(
            seen.transactions_after > seen.transactions_before,
            "their connections go on: there are more transactions",
        ),
        Check::new(failed == 0, format!("failed transactions: {failed}")),
        Check::new(seen.balances_agree, "no transaction lost: balances and history agree"),
        Check::new(
            seen.chain.as_deref().is_some_and(|chain| check_chain(chain).is_ok()),
            "every hash of the chain is right: this host has computed it, too",
        ),
        Check::new(seen.mode != "attached", "the machine is native"),
        Check::new(seen.complaint.is_none(), "the kernel has no complaint"),
    ];
    conclude(&checks, seen.complaint.as_deref())?;
    try_next(&[
        ("make shell", "by hand: mercury checkpoint /dev/vda, change something, mercury restore /dev/vda"),
        ("make demo-move", "the same without an image: a running machine moves to another one and back"),
        ("docs/checkpoint.md", "how to do it with your own machine"),
    ]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        Seen {
            boot_before: "a".into(),
            boot_after: "a".into(),
            pgbench_before: "7 100".into(),
            pgbench_after: "7 100".into(),
            transactions_before: 10,
            transactions_after: 20,
            report: Some(database::Measured { per_second: 1.0, done: 20, failed: 0 }),
            balances_agree: true,
            // SHA-256 of 32 zero bytes.
            chain: Some("1 66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925".into()),
            mode: "unloaded".into(),
            ..Seen::default()
        }
    }

    #[test]
    fn any_wrong_observation_breaks_the_promise() {
        assert!(verdict(&seen()).is_ok());
        let wrong = [
            Seen { boot_after: "b".into(), ..seen() },
            Seen { pgbench_after: "7 200".into(), ..seen() },
            Seen { transactions_after: 10, ..seen() },
            Seen { report: None, ..seen() },
            Seen { balances_agree: false, ..seen() },
            Seen { chain: Some("1 00".into()), ..seen() },
            Seen { chain: None, ..seen() },
            Seen { mode: "attached".into(), ..seen() },
            Seen { complaint: Some("oops".into()), ..seen() },
        ];
        assert!(wrong.iter().all(|seen| verdict(seen).is_err()));
    }
}
