//! `mercury fault`.

use clap::Args;
use mercury_abi::ioctl::FaultRequest;
use mercury_control::{
    device::{Access, Device},
    driver::Driver,
    error::Result,
    output::{Render, Text},
};
use serde::Serialize;
use std::num::ParseIntError;

#[derive(Debug, Args)]
pub struct FaultArgs {
    /// Number of the fault point; 0 disarms all and tells how many have fired
    pub point: u32,
    /// Only on this CPU
    #[arg(long)]
    pub cpu: Option<u32>,
    /// Passage at which to fire, counting from 1
    #[arg(long, default_value_t = 1)]
    pub passage: u32,
    /// For altered facts: byte offset of the word
    #[arg(long, default_value_t = 0)]
    pub offset: u32,
    /// For altered facts: new value of the word
    #[arg(long, default_value = "0", value_parser = word)]
    pub value: u32,
}

/// Parses a 32-bit number, decimal or with 0x.
fn word(text: &str) -> std::result::Result<u32, ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

/// The result of `mercury fault`.
#[derive(Serialize)]
pub struct Fired {
    fired: u32,
}

impl Render for Fired {
    fn render(&self, to: &mut Text) {
        to.line(format!("fault points have fired {} times since load", self.fired));
    }
}

/// Arms a fault point.
///
/// # Errors
///
/// Returns an error if the driver is not loaded or has no fault points.
pub fn arm(args: &FaultArgs) -> Result<Fired> {
    let request = FaultRequest {
        point: args.point,
        cpu: args.cpu.unwrap_or(u32::MAX),
        passage: args.passage,
        offset: args.offset,
        value: args.value,
        ..FaultRequest::default()
    };
    Device::open(Access::Control)?.fault(request).map(|fired| Fired { fired })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(word("0x10"), Ok(16));
        assert_eq!(word("10"), Ok(10));
        assert!(word("x").is_err());
    }
}
