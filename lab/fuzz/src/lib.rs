//! Fuzz targets for every parser of outside bytes.
//!
//! A target is a plain function of bytes ([`Target`]). Three programs drive it:
//!
//! - `mercury-fuzz`, with the generator of [`mutate`], for a minute each in `make check`;
//! - the test of this crate, for some hundred inputs each;
//! - `cargo fuzz`, guided by coverage, for hours; it needs the nightly toolchain
//!   (`lab/fuzz/cargo-fuzz`).
//!
//! Parsers whose input has a checksum get inputs in a small language: a list of records. The target
//! computes the checksums, so that mutations reach the code behind them.
#![allow(missing_docs, reason = "a program of the lab; comments stand where they say something")]

pub mod input;
pub mod mutate;
pub mod run;
pub mod targets;

/// A parser of outside bytes as a function.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name on the command line and in `cargo fuzz run`.
    pub name: &'static str,
    /// Parses an input. A panic is a finding. The result tells outcomes apart: the generator keeps an
    /// input with a new outcome.
    pub run: fn(&[u8]) -> u64,
    /// Returns the inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets, in the order of the list in docs/development.md.
pub const TARGETS: [Target; 11] = [
    targets::image::TARGET,
    targets::wire::TARGET,
    targets::announcement::TARGET,
    targets::records::TARGET,
    targets::virtio::TARGET,
    targets::subnet::TARGET,
    targets::controllers::TARGET,
    targets::gdb::TARGET,
    targets::guest::TARGET,
    targets::orders::TARGET,
    targets::command_line::TARGET,
];

/// Returns the target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
