//! A pre-virtualized kernel or module: its ELF file, the records of its slots, and its code.

use crate::{Target, input::outcome};
use mercury_afterburner::{
    record::{Record, SECTION, SIZE},
    verify::{check::account, image::Image},
};

/// Address of the code.
const CODE_AT: u64 = 0x1000;
const CLI: u8 = 1;

pub const TARGET: Target = Target { name: "records", run, seeds };

/// Returns a file with one slot, `cli` and a NOP of four bytes; one without records; and a record alone.
fn seeds() -> Vec<Vec<u8>> {
    let record = [&CODE_AT.to_le_bytes()[..], &[5, 0, 1, CLI, 0, 0, 0, 1]].concat();
    let code = [0xFA, 0x0F, 0x1F, 0x40, 0x00, 0xC3];
    vec![elf(&code, &record), elf(&code, &[]), record]
}

/// Makes a linked ELF file with this code and these records.
fn elf(code: &[u8], records: &[u8]) -> Vec<u8> {
    let names = format!("\0.text\0{SECTION}\0.symtab\0.strtab\0.shstrtab\0");
    let at = |name: &str| names.find(&format!("\0{name}\0")).map_or(0, |at| at as u32 + 1);
    let symbol = [&1_u32.to_le_bytes()[..], &[0x12, 0, 1, 0], &CODE_AT.to_le_bytes(), &6_u64.to_le_bytes()];
    let symbols = [&[0; 24][..], &symbol.concat()].concat();
    // Name, type, flags, address, contents, link, entry size.
    type Section<'a> = (u32, u32, u64, u64, &'a [u8], u32, u64);
    let sections: [Section<'_>; 6] = [
        (0, 0, 0, 0, &[], 0, 0),
        (at(".text"), 1, 6, CODE_AT, code, 0, 0),
        (at(SECTION), 1, 0, 0, records, 0, 0),
        (at(".symtab"), 2, 0, 0, &symbols, 4, 24),
        (at(".strtab"), 3, 0, 0, b"\0f\0", 0, 0),
        (at(".shstrtab"), 3, 0, 0, names.as_bytes(), 0, 0),
    ];
    let mut contents = Vec::new();
    let mut headers = Vec::new();
    for (name, kind, flags, address, bytes, link, entry) in sections {
        let offset = 64 + contents.len() as u64;
        headers.extend([name, kind].map(u32::to_le_bytes).concat());
        headers.extend([flags, address, offset, bytes.len() as u64].map(u64::to_le_bytes).concat());
        headers.extend([link, 1].map(u32::to_le_bytes).concat());
        headers.extend([8, entry].map(u64::to_le_bytes).concat());
        contents.extend_from_slice(bytes);
        contents.resize(contents.len().next_multiple_of(8), 0);
    }
    let mut file = b"\x7FELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([2_u16, 62].map(u16::to_le_bytes).concat());
    file.extend(1_u32.to_le_bytes());
    file.extend([CODE_AT, 0, 64 + contents.len() as u64].map(u64::to_le_bytes).concat());
    file.extend(0_u32.to_le_bytes());
    file.extend([64_u16, 0, 0, 64, 6, 5].map(u16::to_le_bytes).concat());
    [file, contents, headers].concat()
}

fn run(input: &[u8]) -> u64 {
    let (records, _) = input.as_chunks::<SIZE>();
    for record in records.iter().filter_map(Record::read) {
        let _ = record.instruction();
        let _ = record.operands.map(|operand| operand.describe());
    }
    match Image::parse(input) {
        Ok(image) => {
            let account = account(&image, "input");
            let whats: String = account
                .findings
                .iter()
                .map(|finding| finding.what.chars().take(9).collect::<String>())
                .collect();
            let sizes = [account.sensitive, account.slots, account.left].map(|size| "x".repeat(size.min(9)));
            outcome(&format!("{whats}{sizes:?}"))
        }
        Err(error) => outcome(&error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first seed must be in order, so that mutations begin behind all checks.
    #[test]
    fn the_first_seed_is_in_order() {
        let image = Image::parse(&seeds()[0]).expect("a kernel");
        let account = account(&image, "seed");
        assert_eq!((account.sensitive, account.slots, account.uncovered), (1, 1, 0), "{account:?}");
        assert!(account.findings.is_empty(), "{account:?}");
    }
}
