//! A storm of NMIs during attach and detach. `steps.rs` has one NMI at each step.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use mercury_lab::{Machine, Result};
use serde_json::Value;

use crate::{
    CPUS, MINUTE, plain,
    subject::{Subject, same},
};

const CYCLES: u32 = 300;

/// Loses no NMI and is disturbed by none. CPU 0 gets NMIs from outside, and each CPU from another,
/// while all CPUs switch.
#[test]
#[ignore = "long"]
fn no_nmi_is_lost_and_none_disturbs() -> Result<()> {
    let mut subject = Subject::boot(plain(), CPUS)?;
    let done = AtomicBool::new(false);
    let (switched, storm) = thread::scope(|scope| {
        let (machine, done) = (&subject.machine, &done);
        let outside = scope.spawn(move || inject_until(machine, done));
        let between = scope.spawn(move || exchange_until(machine, done));
        let switched = machine
            .command(&format!("mercury-workload switch --cycles {CYCLES}"))
            .timeout(3 * MINUTE)
            .run()
            .and_then(mercury_lab::Output::check);
        done.store(true, Ordering::Relaxed);
        let injected = outside.join().unwrap_or(Ok(0));
        let exchanged = between.join().unwrap_or(Ok((0, 0)));
        (switched, injected.and_then(|injected| Ok((injected, exchanged?))))
    });
    let (injected, (sent, lost)) = storm?;
    switched?;
    println!("{injected} NMIs from outside, {sent} between CPUs, {lost} lost");
    same("lost", lost, 0)?;
    same("a storm", injected > 100 && sent > 100, true)?;
    subject.is_as_before()?;
    subject.attaches_again(&[])?;
    subject.finish()
}

fn inject_until(machine: &Machine, done: &AtomicBool) -> Result<u64> {
    let mut injected = 0;
    while !done.load(Ordering::Relaxed) {
        machine.qmp()?.inject_nmi()?;
        injected += 1;
        thread::sleep(Duration::from_millis(2));
    }
    Ok(injected)
}

/// Sends NMIs from each CPU to the next, in turn. Returns the number sent, and the number that
/// never arrived.
fn exchange_until(machine: &Machine, done: &AtomicBool) -> Result<(u64, u64)> {
    let (mut sent, mut lost) = (0, 0);
    for cpu in (0..CPUS).cycle() {
        if done.load(Ordering::Relaxed) {
            break;
        }
        let to = (cpu + 1) % CPUS;
        let line = format!("mercury-workload kernel nmi {to} 200 --on {cpu}");
        let said: Value = serde_json::from_str(&machine.sh(&line)?).unwrap_or_default();
        sent += said["sent"].as_u64().unwrap_or(0);
        lost += said["lost"].as_u64().unwrap_or(u64::MAX);
    }
    Ok((sent, lost))
}
