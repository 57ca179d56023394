//! The decoder: one instruction after the other. Symbols put the decoder back on track after data
//! among code.

use iced_x86::{Decoder, DecoderOptions, Instruction};

use super::image::{Code, Image};
use crate::kind::Kind;

/// UD2 and a name, before an instruction that a hypervisor is to emulate: Xen knows it by these
/// bytes. Without Xen execution does not continue after UD2.
const EMULATED_BY_XEN: &[u8] = b"\x0f\x0bxen";
/// CPUID, the only instruction that Linux has after that prefix.
const CPUID: &[u8] = b"\x0f\xa2";

/// A result of the decoder.
#[derive(Debug)]
pub enum Found<'a> {
    /// A decoded instruction.
    Instruction(&'a Instruction),
    /// Bytes from this address on that are no instruction.
    Nothing(u64),
}

/// Calls `visit` for everything in a section, in order.
pub fn scan(image: &Image, code: &Code, mut visit: impl FnMut(Found<'_>)) {
    let landmarks = landmarks(image, code);
    let modes = modes(image, code);
    let mut at = code.address;
    let mut next = 0;
    let mut instruction = Instruction::default();
    while at < code.end() {
        while landmarks.get(next).is_some_and(|landmark| landmark.address < at) {
            next += 1;
        }
        if let Some(data) = landmarks.get(next).filter(|one| one.address == at).and_then(|one| one.data_until)
        {
            at = data;
            continue;
        }
        let offset = (at - code.address) as usize;
        let mut decoder = Decoder::with_ip(bits(&modes, at), &code.bytes[offset..], at, DecoderOptions::NONE);
        decoder.decode_out(&mut instruction);
        let end = at + instruction.len().max(1) as u64;
        let end = if is_emulated(&code.bytes[offset..]) { at + EMULATED_BY_XEN.len() as u64 } else { end };
        let cut = landmarks[next..].iter().take(2).find(|one| one.address > at && one.address < end);
        match instruction.is_invalid() {
            false => visit(Found::Instruction(&instruction)),
            true => visit(Found::Nothing(at)),
        }
        // A symbol can be in the middle of an instruction, as in the mitigations' thunks. Both ways
        // are decoded then.
        at = match (cut, instruction.is_invalid()) {
            (Some(landmark), _) => landmark.address,
            (None, false) => end,
            (None, true) => at + 1,
        };
    }
}

/// Returns the instruction at an address; `None` if the bytes are no instruction.
#[must_use]
pub fn decode(image: &Image, code: &Code, at: u64) -> Option<Instruction> {
    let bytes = code.bytes.get((at - code.address) as usize..)?;
    let instruction =
        Decoder::with_ip(bits(&modes(image, code), at), bytes, at, DecoderOptions::NONE).decode();
    (!instruction.is_invalid()).then_some(instruction)
}

fn is_emulated(bytes: &[u8]) -> bool {
    bytes.strip_prefix(EMULATED_BY_XEN).is_some_and(|rest| rest.starts_with(CPUID))
}

/// An address at which an instruction or data is known to begin.
struct Landmark {
    address: u64,
    data_until: Option<u64>,
}

fn landmarks(image: &Image, code: &Code) -> Vec<Landmark> {
    let first = image.symbols.partition_point(|symbol| symbol.address < code.address);
    let inside = image.symbols[first..].iter().take_while(|symbol| symbol.address < code.end());
    let mut all: Vec<Landmark> = Vec::new();
    for symbol in inside {
        let data_until =
            (symbol.is_data && symbol.size > 0).then(|| (symbol.address + symbol.size).min(code.end()));
        match all.last_mut() {
            Some(last) if last.address == symbol.address => last.data_until = last.data_until.or(data_until),
            _ => all.push(Landmark { address: symbol.address, data_until }),
        }
    }
    all
}

/// The mode of the code from an address on.
struct Mode {
    from: u64,
    bits: u32,
}

/// Returns the modes of a section. A section begins in 64-bit mode, and the records tell the
/// changes.
fn modes(image: &Image, code: &Code) -> Vec<Mode> {
    let inside = image
        .records
        .iter()
        .filter(|record| record.kind == Kind::Mode && (code.address..code.end()).contains(&record.slot));
    let changes = inside.map(|record| Mode { from: record.slot, bits: u32::from(record.operands[0].0) });
    [Mode { from: code.address, bits: 64 }].into_iter().chain(changes).collect()
}

fn bits(modes: &[Mode], at: u64) -> u32 {
    let before = modes.partition_point(|mode| mode.from <= at);
    modes[..before].last().map_or(64, |mode| mode.bits)
}
