//! `mercury inspect`: shows the contents of an image, and checks if it is intact; writes its memory
//! as an ELF core.

pub mod core;

use self::core::Core;
use clap::Args;
use mercury_control::{
    error::Result,
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text, bytes, thousands},
    say::Say,
};
use mercury_image::{Commit, Machine};
use mercury_relocation::{
    images::{self, Image},
    tombstone::when,
};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The image: a file, a block device, or - for standard input
    pub image: PathBuf,
    /// Only read the description of the machine; do not check the rest
    #[arg(long, conflicts_with = "core")]
    pub quick: bool,
    /// Write the memory of the image into this file as an ELF core, for crash and gdb
    #[arg(long, value_name = "FILE")]
    pub core: Option<PathBuf>,
}

/// The contents of an image.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    identity: String,
    machine: Machine,
    /// True if its machine has come back from it.
    restored: bool,
    /// Bytes read.
    bytes: u64,
    /// Commit record at the end, if the whole image was read and is intact.
    commit: Option<Commit>,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let Self { identity, machine, restored, bytes: length, commit } = self;
        let memory = machine.kept_pages().saturating_mul(4096);
        to.line(format!("image {identity}, by mercury {}", machine.mercury));
        if let Some(parent) = machine.parents.last() {
            to.line(format!("incremental: made on image {parent}, {} in all", machine.parents.len() + 1));
        }
        to.line(format!(
            "machine: {}, {} of memory, {} CPUs",
            machine.host,
            bytes(memory),
            machine.cpus.len()
        ));
        to.line(format!("processor: {}, microcode {}", machine.processor.model, machine.processor.microcode));
        to.wrapped("kernel: ", &machine.kernel);
        to.line(format!("taken at: {}, by the machine's own clock", when::utc(machine.taken_at)));
        if *restored {
            to.line("restored: its machine has come back from it");
        }
        for device in &machine.devices {
            let driver = device.driver.as_deref().unwrap_or("–");
            to.line(format!("device {}: {} {driver}", device.address, device.id));
        }
        for controller in &machine.nvme {
            for disk in &controller.disks {
                to.line(format!(
                    "disk {}: namespace {} of {}",
                    disk.name, disk.namespace, controller.address
                ));
            }
        }
        for file_system in &machine.file_systems {
            let fingerprint =
                if file_system.fingerprint.is_some() { "with fingerprint" } else { "no fingerprint" };
            to.line(format!(
                "file system {}: {} on {}, {fingerprint}",
                file_system.mounted_at, file_system.kind, file_system.device
            ));
        }
        match commit {
            Some(commit) => whole(commit, *length, to),
            None => to.line("not checked"),
        }
    }
}

fn whole(commit: &Commit, length: u64, to: &mut Text) {
    to.line(format!(
        "whole: {} in {} records, {} frames, {} of zeros, {} duplicates",
        bytes(length),
        thousands(commit.records + 1),
        thousands(commit.frames),
        thousands(commit.zeros),
        thousands(commit.duplicates)
    ));
    if commit.unchanged > 0 {
        let share = commit.unchanged as f64 * 100.0 / commit.frames.max(1) as f64;
        to.line(format!("as in its parent: {} frames, {share:.1} %", thousands(commit.unchanged)));
    }
}

/// Reads an image.
///
/// # Errors
///
/// Returns an error if it is no image, or damaged.
pub fn run(args: &InspectArgs, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let mut image = Image::open(&args.image)?;
    if args.core.is_some() {
        images::refuse_incremental(&args.image, image.machine())?;
    }
    let mut core = args.core.as_ref().map(|path| Core::create(path, image.machine())).transpose()?;
    if !args.quick {
        image.read("checking", &deferred, |chunk| core.as_mut().map_or(Ok(()), |core| core.add(&chunk)))?;
    }
    core.map_or(Ok(()), |core| core.finish(image.machine(), &[]))?;
    say.done(&Report {
        identity: image.identity().to_string(),
        machine: image.machine().clone(),
        restored: image.was_restored(),
        bytes: image.offset(),
        commit: image.commit().cloned(),
    });
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instant_is_a_date() {
        let machine = Machine { taken_at: 1_795_568_400, ..Machine::default() };
        let mut text = Text::new(false);
        Report { identity: String::new(), machine, restored: true, bytes: 0, commit: None }.render(&mut text);
        let text = text.finish();
        assert!(text.contains("\ntaken at: 2026-11-25 01:00:00 UTC, by the machine's own clock\n"));
        assert!(text.contains("\nrestored: "), "{text}");
    }
}
