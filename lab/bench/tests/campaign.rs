//! Campaigns of faults: a machine that is hurt goes back to its snapshot with right sums, and a campaign that
//! was ended goes on.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use mercury_lab::{Kernel, Platform, Result, Vendor, error::Error};
use mercury_lab_bench::campaign::{
    Load, Moment, Plan, check,
    fault::Class,
    record::{Outcome, Record, Results},
    run,
};

/// The results' file of a test, which is removed at the end.
struct Kept(PathBuf);

impl Kept {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("mercury-campaign-{}-{name}.jsonl", std::process::id())))
    }

    fn run(&self, plan: &Plan) -> Result<Vec<Record>> {
        Ok(run(plan, Results::at(self.0.clone())?)?.all().to_vec())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Skips the test in Bochs, where this version does not roll back.
fn need_qemu() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    Platform::need(Vendor::Amd, "this version cannot put back a machine with this processor")?;
    Err(Error::Unsupported { reason: "this SVM reports no interrupts in delivery" })
}

fn plan(classes: &[Class], count: usize) -> Plan {
    Plan {
        kernel: Kernel::BookwormCloud,
        cpus: 2,
        load: Load::Idle,
        moment: Moment::JustBefore,
        classes: classes.to_vec(),
        count,
        seed: 1,
        time: None,
    }
}

fn died(all: &[Record]) -> usize {
    all.iter().filter(|record| record.outcome == Outcome::Right).count()
}

/// Flips a few bits, in two runs of the same campaign.
#[test]
fn a_machine_with_flipped_bits_goes_back() -> Result<()> {
    need_qemu()?;
    let kept = Kept::new("short");
    let classes = [Class::Code, Class::PageTables];
    assert_eq!(kept.run(&plan(&classes, 1))?.len(), 1);
    let all = kept.run(&plan(&classes, 3))?;
    let numbers: Vec<_> = all.iter().map(|record| (record.class, record.number)).collect();
    assert_eq!(numbers, [(Class::Code, 0), (Class::PageTables, 0), (Class::Code, 1)]);
    check(&all)?;
    assert!(died(&all) > 0, "no fault was lethal");
    Ok(())
}

/// All classes, with PostgreSQL: LKDTM's crash types, and flips.
#[test]
#[ignore = "long"]
fn a_machine_with_a_database_goes_back_from_all_classes() -> Result<()> {
    need_qemu()?;
    let kept = Kept::new("long");
    let classes = [
        Class::Lkdtm,
        Class::Code,
        Class::Registers,
        Class::Stack,
        Class::Slab,
        Class::Data,
        Class::PageTables,
    ];
    let all = kept.run(&Plan { load: Load::Postgres, ..plan(&classes, 35) })?;
    check(&all)?;
    assert!(died(&all) >= 5, "few faults were lethal");
    assert!(all.iter().all(|record| record.outcome != Outcome::Refused), "{all:?}");
    Ok(())
}

/// The first of LKDTM's crash types: panic, BUG, exceptions, a lockup and others.
#[test]
#[ignore = "long"]
fn a_machine_goes_back_from_crash_types() -> Result<()> {
    need_qemu()?;
    let kept = Kept::new("lkdtm");
    let all = kept.run(&plan(&[Class::Lkdtm], 20))?;
    check(&all)?;
    let of = |name: &str| all.iter().find(|record| record.fault == name).map(|record| record.outcome);
    for lethal in ["PANIC", "BUG", "EXCEPTION"] {
        assert_eq!(of(lethal), Some(Outcome::Right), "{lethal}");
    }
    Ok(())
}

/// A snapshot every 30 seconds, and flips at random in between.
#[test]
#[ignore = "long"]
fn a_machine_goes_back_at_random_moments() -> Result<()> {
    need_qemu()?;
    let kept = Kept::new("random");
    let all = kept.run(&Plan { moment: Moment::AtRandom, ..plan(&[Class::Registers], 4) })?;
    check(&all)?;
    Ok(())
}
