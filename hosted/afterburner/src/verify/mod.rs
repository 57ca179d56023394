//! Disassembles what was linked and accounts for every sensitive instruction, whatever the rewriter believes.
//!
//! Everything here is read from the finished file: the instructions from its code, the slots from its records. What has
//! to hold, for each file:
//!
//! - every sensitive instruction is the one of a record, with that kind, length and operands;
//! - every record is that of a sensitive instruction;
//! - every slot consists of whole instructions: sensitive ones, ordinary ones that may be moved, at most one NOP, and traps
//!   behind a jump or a return; and it is long enough;
//! - nothing leads into the middle of a slot: no branch, no symbol, no pointer that the linker knows of.
//!
//! [`image`] reads the file, [`scan`] decodes it, [`check`] holds one against the other, [`report`] tells people.

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

/// What is wrong somewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub what: String,
    /// Where: an address, or an offset in a module's section.
    pub address: u64,
    /// The section.
    pub section: String,
    /// The function, as far as the symbols tell.
    pub function: String,
    /// The source file, as far as the symbols tell.
    pub source: String,
}

/// What a file was found to hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// The file.
    pub file: String,
    /// Bytes of code.
    pub code_bytes: u64,
    /// Sensitive instructions.
    pub sensitive: usize,
    /// Of them, those with no record.
    pub uncovered: usize,
    /// Of them, those that are written down without a slot, by rule.
    pub left: usize,
    /// Slots.
    pub slots: usize,
    /// Slots that need no NOP, for they have borrowed from their neighbours, or are long enough.
    pub without_nop: usize,
    /// Bytes of NOPs and traps in slots.
    pub filled_bytes: u64,
    /// Sensitive instructions by kind.
    pub kinds: BTreeMap<&'static str, usize>,
    /// Everything that is wrong.
    pub findings: Vec<Finding>,
}

/// Accounts for a file.
///
/// # Errors
/// If it cannot be read, is no x86-64 ELF file, or has sensitive instructions and no records.
pub fn verify(path: &Path) -> Result<Account> {
    let image = Image::read(path)?;
    let account = check::account(&image, &path.display().to_string());
    if account.sensitive > 0 && !image.has_records {
        return Err(Error::new(format!(
            "{}: there is no section {SECTION}: this was not pre-virtualized, or has been stripped",
            path.display()
        )));
    }
    Ok(account)
}

fn is_slot(kind: Kind, flags: Flags) -> bool {
    kind != Kind::Mode && !flags.has(Flags::LEFT)
}
