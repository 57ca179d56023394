//! Stores to pages that are read-only for integrity ([`crate::integrity`]).

use mercury_abi::shared::{ExitReason, LogKind};

use super::vmcb::INTERCEPT_CR3_WRITE;
use super::{Area, guests};
use crate::address::PAGE_SIZE;
use crate::exit::Answer;
use crate::integrity::{self, Store};
use crate::x86::Hardware;
use crate::{nested, publish};

/// Return addresses of the stack that a record has.
const CALLERS: usize = 3;
/// Words of the stack that are searched for them.
const WORDS: u64 = 256;
/// The kernel's image and its modules begin here (Linux: `__START_KERNEL_map`).
const KERNEL_START: u64 = 0xFFFF_FFFF_8000_0000;

/// They end here, with those of its modules (Linux: `MODULES_END`).
const KERNEL_END: u64 = 0xFFFF_FFFF_FF00_0000;

/// Answers a store at a guest-physical address; `None` if its page is not restricted for integrity.
pub fn answer(area: &mut Area, hardware: &mut impl Hardware, address: u64) -> Option<Answer> {
    let rip = area.control.rip;
    match integrity::store(area, address, [area.control.cr3, rip])? {
        Store::Own(root) => {
            publish::count(area, ExitReason::TextPoke);
            area.control.nested_cr3 = root.as_u64();
            area.control.intercept_cr_dr_exceptions[0] |= INTERCEPT_CR3_WRITE;
        }
        Store::Foreign => {
            publish::count(area, ExitReason::ForeignStore);
            let [first, second, third] = callers(area, hardware);
            let tsc = hardware.tsc();
            publish::log(area, LogKind::ForeignStore, tsc, [address, rip, first, second, third]);
        }
    }
    Some(Answer::RetryFlushed)
}

/// Answers the write of CR3 after a change of the kernel's code: the pages are read-only again.
pub fn poke_ends(area: &mut Area) -> Answer {
    publish::count(area, ExitReason::TextPoke);
    area.control.intercept_cr_dr_exceptions[0] &= !INTERCEPT_CR3_WRITE;
    if area.cpu.on_snapshot == 0 {
        area.control.nested_cr3 = nested::root().as_u64();
    }
    Answer::RetryFlushed
}

/// Returns the first words of the kernel's stack that are addresses of the kernel's code; 0 where there are
/// none. Some of them may be of calls that have returned.
fn callers(area: &mut Area, hardware: &mut impl Hardware) -> [u64; CALLERS] {
    let mut found = [0; CALLERS];
    if area.control.cpl != 0 {
        return found;
    }
    // User mode may have trained predictions, and the system's memory is mapped.
    hardware.forget_predictions(area.cpu.barriers);
    let (mut at, mut count) = (area.control.rsp & !7, 0);
    let end = at.saturating_add(8 * WORDS);
    while at < end && count < CALLERS {
        let Some(phys) = guests::translate(area, hardware, at) else { break };
        let rest = (end - at).min(PAGE_SIZE - at % PAGE_SIZE);
        for offset in (0..rest).step_by(8) {
            let word = guests::read_physical(area, hardware, phys + offset).unwrap_or(0);
            if (KERNEL_START..KERNEL_END).contains(&word) && count < CALLERS {
                found[count] = word;
                count += 1;
            }
        }
        at += rest;
    }
    guests::hide(area, hardware);
    found
}
