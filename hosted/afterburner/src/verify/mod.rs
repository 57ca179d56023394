//! The verifier. It disassembles the linked file and accounts for every sensitive instruction,
//! independently of the rewriter.
//!
//! It reads everything from the finished file: the instructions from its code, the slots from its
//! records. For each file these properties must hold:
//!
//! - Every sensitive instruction has a record with its kind, length and operands.
//! - Every record is that of a sensitive instruction.
//! - Every slot is long enough and consists of whole instructions: sensitive ones, ordinary ones
//!   that may be moved, at most one NOP, and traps after a jump or a return.
//! - Nothing leads into the middle of a slot: no branch, no symbol, no pointer that the linker
//!   knows of.
//!
//! [`image`] reads the file, [`scan`] decodes it, [`check`] compares both, and [`report`] prints
//! the result.

pub mod check;
pub mod image;
pub mod report;
pub mod scan;

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use crate::{
    error::{Error, Result},
    kind::Kind,
    record::{Flags, SECTION},
};
use image::Image;

/// A violation at one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Description of the violation.
    pub what: String,
    /// Its address, or its offset in a module's section.
    pub address: u64,
    /// Name of the section.
    pub section: String,
    /// Function at the address, as far as the symbols tell.
    pub function: String,
    /// Source file of the address, as far as the symbols tell.
    pub source: String,
}

/// The account of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Path of the file.
    pub file: String,
    /// Bytes of code in the file.
    pub code_bytes: u64,
    /// Number of sensitive instructions.
    pub sensitive: usize,
    /// Number of those without a record.
    pub uncovered: usize,
    /// Number of those that are recorded without a slot, by rule.
    pub left: usize,
    /// Number of slots in the file.
    pub slots: usize,
    /// Number of slots without a NOP: they have borrowed from their neighbours, or are long enough.
    pub without_nop: usize,
    /// Bytes of NOPs and traps in slots.
    pub filled_bytes: u64,
    /// Numbers of sensitive instructions by kind.
    pub kinds: BTreeMap<&'static str, usize>,
    /// All violations in the file.
    pub findings: Vec<Finding>,
}

/// Accounts for a file.
///
/// # Errors
/// The file cannot be read, is no x86-64 ELF file, or has sensitive instructions and no records.
pub fn verify(path: &Path) -> Result<Account> {
    let image = Image::read(path)?;
    let account = check::account(&image, &path.display().to_string());
    if account.sensitive > 0 && !image.has_records {
        return Err(Error::new(format!(
            "{}: there is no section {SECTION}: the file was not pre-virtualized, or was stripped",
            path.display()
        ))
        .hint("build it with `afterburner make`, and name the file in the build's directory"));
    }
    Ok(account)
}

fn is_slot(kind: Kind, flags: Flags) -> bool {
    kind != Kind::Mode && !flags.has(Flags::LEFT)
}
