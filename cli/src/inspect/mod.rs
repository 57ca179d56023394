//! `mercury inspect`: what is in an image, and whether it is whole; and its memory as an ELF core.

mod core;

use self::core::Core;
use crate::{
    args::InspectArgs,
    checkpoint::stream::image_error,
    commands::Say,
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text, bytes, thousands},
    progress,
};
use mercury_image::{Commit, Kind, Machine, Reader};
use serde::Serialize;
use std::{
    fs::File,
    io::{self, BufReader, Read},
    time::{Duration, Instant},
};

/// What an image is.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    identity: String,
    machine: Machine,
    /// Bytes read.
    bytes: u64,
    /// What it says at its end, if all of it was read and is right.
    commit: Option<Commit>,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let Self { identity, machine, bytes: length, commit } = self;
        let kept = machine.ranges.iter().filter(|range| range.kind == Kind::Kept);
        let memory: u64 = kept.map(|range| range.pages * 4096).sum();
        to.line(format!("image {identity}, by mercury {}", machine.mercury));
        to.line(format!(
            "machine: {}, {} of memory, {} CPUs",
            machine.host,
            bytes(memory),
            machine.cpus.len()
        ));
        to.line(format!("processor: {}, microcode {}", machine.processor.model, machine.processor.microcode));
        to.wrapped("kernel: ", &machine.kernel);
        to.line(format!("taken at: {} s after 1970 (UTC), by its own clock", machine.taken_at));
        for device in &machine.devices {
            let driver = device.driver.as_deref().unwrap_or("–");
            to.line(format!("device {}: {} {driver}", device.address, device.id));
        }
        for file_system in &machine.file_systems {
            let mark = if file_system.mark.is_some() { "marked" } else { "not marked" };
            to.line(format!(
                "file system {}: {} on {}, {mark}",
                file_system.mounted_at, file_system.kind, file_system.device
            ));
        }
        match commit {
            Some(commit) => to.line(format!(
                "whole: {} in {} records, {} frames, {} of zeros, {} duplicates",
                bytes(*length),
                thousands(commit.records + 1),
                thousands(commit.frames),
                thousands(commit.zeros),
                thousands(commit.duplicates)
            )),
            None => to.line("not checked"),
        }
    }
}

/// Reads an image.
///
/// # Errors
/// If it is none, or damaged.
pub fn run(args: &InspectArgs, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let from: Box<dyn Read> = if args.image.as_os_str() == "-" {
        Box::new(io::stdin())
    } else {
        let file = File::open(&args.image).map_err(|error| {
            Error::new(Exit::Failed, format!("{} cannot be read: {error}", args.image.display()))
                .hint("name the file or the device that `mercury checkpoint` wrote")
        })?;
        Box::new(BufReader::with_capacity(1 << 20, file))
    };
    let mut reader = Reader::open(from).map_err(image_error)?;
    let mut core = args.core.as_ref().map(|path| Core::create(path, reader.machine())).transpose()?;
    let mut shown = Instant::now();
    while !args.quick
        && let Some(chunk) = reader.next_chunk().map_err(image_error)?
    {
        core.as_mut().map_or(Ok(()), |core| core.add(&chunk))?;
        if deferred.requested() {
            return Err(Error::new(Exit::Interrupted, "interrupted"));
        }
        if shown.elapsed() > Duration::from_millis(500) {
            shown = Instant::now();
            progress::line(&format!("checking: {}", bytes(reader.offset())));
        }
    }
    progress::line("");
    core.map_or(Ok(()), |core| core.finish(reader.machine()))?;
    say.done(&Report {
        identity: reader.identity().to_string(),
        machine: reader.machine().clone(),
        bytes: reader.offset(),
        commit: reader.commit().cloned(),
    });
    Ok(Exit::Done)
}
