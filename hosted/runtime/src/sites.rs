//! Sites of system calls in programs, and plans to rewrite them so that they jump instead of
//! trapping.
//!
//! SYSCALL has two bytes. A jump to a fixed address has seven: it goes through a pointer below 2
//! GiB, because programs lie anywhere.
//!
//! - **In place**: the jump takes the place of SYSCALL and of five or six bytes of instructions
//!   before it, as the usual `mov $number,%eax` has. A system call that is started again, or a
//!   loop, may enter below the jump. There it meets a byte that is no instruction: the jump's last
//!   two bytes always are such bytes, and those before if the plan asks for that. The trap shows
//!   where it was meant to go on.
//! - **By a stone**: a short jump takes the place of the one instruction before. It leads to the
//!   long jump, which lies in the padding after a return nearby. SYSCALL stays.
//!
//! Displaced instructions are executed from a copy, so they must mean the same there, wherever the
//! page is mapped. Decoding starts at many places before the site, and all must agree on where
//! instructions begin. Otherwise the site is left.

use std::ops::Range;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// The size of a page, in bytes.
pub const PAGE: usize = 4096;
/// Bytes of the long jump.
pub const LONG_JUMP: usize = 7;
const SHORT_JUMP: usize = 2;
const SYSCALL: [u8; 2] = [0x0F, 0x05];
/// The distances before a site at which decoding starts. After the nearest of them it has found the
/// instructions' beginnings.
const SWEEP: Range<usize> = 48..128;
/// Of those that arrive at the site, at least so many.
const VOICES: usize = 8;
/// At most as much is displaced.
const MOST_DISPLACED: usize = 16;
/// Compilers align functions and loops to this.
const ALIGNMENT: usize = 16;
/// The offsets in the long jump that a pointer's address can make traps. The offsets after them
/// always are.
const TRAPS_IF_ASKED: Range<usize> = 3..5;
const TRAPS: Range<usize> = 5..7;

/// Why a site is left as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    NoSite,
    /// Too near to the beginning or the end of its page.
    Edge,
    /// The beginnings of the instructions before the site are not clear.
    Unclear,
    /// The instructions before the site cannot be moved, or would be cut in the middle.
    Immovable,
    /// The return from a signal, by whose bytes unwinders know it.
    SignalReturn,
}

/// A plan to rewrite a site. Offsets are in its page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The first instruction that is displaced, to which the rewritten program comes.
    pub start: usize,
    /// The offset of SYSCALL.
    pub site: usize,
    /// The offset of the long jump.
    pub jump: usize,
    /// All bytes of the pointer's address have to be traps.
    pub all_trap: bool,
    /// Beginnings of instructions below the long jump, but for its own.
    pub inside: Vec<usize>,
}

impl Plan {
    /// Returns the ranges of the page that change, or must not change.
    #[must_use]
    pub fn ranges(&self) -> [Range<usize>; 2] {
        [self.start..self.site + SYSCALL.len(), self.jump..self.jump + LONG_JUMP]
    }

    /// Returns the bytes to write into the page, and their offsets. The pointer has to lie below 2
    /// GiB.
    #[must_use]
    pub fn edits(&self, pointer: u32) -> Vec<(usize, Vec<u8>)> {
        let mut long = vec![0xFF, 0x24, 0x25];
        long.extend(pointer.to_le_bytes());
        let mut edits = vec![(self.jump, long)];
        if self.jump != self.start {
            edits.push((self.start, vec![0xEB, (self.jump - self.start - SHORT_JUMP) as u8]));
        }
        edits
    }
}

/// Returns true if a byte begins no instruction in 64-bit mode.
#[must_use]
pub fn is_trap(byte: u8) -> bool {
    const NONE: &[u8] = &[
        0x06, 0x07, 0x0E, 0x16, 0x17, 0x1E, 0x1F, 0x27, 0x2F, 0x37, 0x3F, 0x60, 0x61, 0x82, 0x9A, 0xCE, 0xEA,
    ];
    NONE.contains(&byte)
}

/// Decides how a site is rewritten.
///
/// # Errors
/// Why it is not.
pub fn plan(page: &[u8; PAGE], site: usize, taken: &[Range<usize>]) -> Result<Plan, Refusal> {
    if page.get(site..site + SYSCALL.len()) != Some(&SYSCALL) {
        return Err(Refusal::NoSite);
    }
    if site < SWEEP.start + ALIGNMENT || site + SYSCALL.len() + LONG_JUMP > PAGE {
        return Err(Refusal::Edge);
    }
    let before = Before::decode(page, site)?;
    if before.returns_from_signal() {
        return Err(Refusal::SignalReturn);
    }
    let in_place = before.in_place(site);
    let is_simple = |plan: &Plan| plan.inside.iter().all(|&at| at >= site);
    let plans = [
        in_place.iter().find(|plan| is_simple(plan)).cloned(),
        before.by_stone(page, site),
        in_place.first().cloned(),
    ];
    let free = |plan: &Plan| !plan.ranges().iter().any(|new| taken.iter().any(|old| overlap(new, old)));
    plans.into_iter().flatten().find(free).ok_or(Refusal::Immovable)
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The instructions before a site, the nearest last.
struct Before {
    instructions: Vec<Instruction>,
}

impl Before {
    fn decode(page: &[u8; PAGE], site: usize) -> Result<Self, Refusal> {
        let low = site.saturating_sub(SWEEP.end);
        let decoded: Vec<Instruction> = (low..site).map(|at| one(page, at)).collect();
        let chain = |from: usize| -> Option<Vec<Instruction>> {
            let mut chain = Vec::new();
            let mut at = from;
            while at < site {
                let instruction = decoded[at - low];
                if instruction.is_invalid() {
                    return None;
                }
                at += instruction.len();
                if site - (at - instruction.len()) <= SWEEP.start - ALIGNMENT {
                    chain.push(instruction);
                }
            }
            (at == site).then_some(chain)
        };
        let chains: Vec<_> = (low..=site - SWEEP.start).filter_map(chain).collect();
        let instructions = chains.first().cloned().ok_or(Refusal::Unclear)?;
        let same = |chain: &Vec<Instruction>| {
            chain.iter().map(Instruction::ip).eq(instructions.iter().map(Instruction::ip))
        };
        if chains.len() < VOICES || !chains.iter().all(same) {
            return Err(Refusal::Unclear);
        }
        Ok(Self { instructions })
    }

    fn returns_from_signal(&self) -> bool {
        const NUMBER: u64 = 15;
        self.instructions.iter().rev().take(3).any(|one| {
            one.mnemonic() == Mnemonic::Mov
                && one.op0_register().full_register() == Register::RAX
                && one.try_immediate(1).is_ok_and(|number| number == NUMBER)
        })
    }

    /// Returns the instructions that can be displaced, the nearest first.
    fn movable(&self) -> impl Iterator<Item = &Instruction> {
        self.instructions.iter().rev().take_while(|one| is_movable(one))
    }

    /// Returns the plans with a jump in place of instructions, those with the fewest first.
    fn in_place(&self, site: usize) -> Vec<Plan> {
        let least = LONG_JUMP - SYSCALL.len();
        let starts: Vec<usize> = self.movable().map(|one| one.ip() as usize).collect();
        let plan = |&start: &usize| {
            if !(least..=MOST_DISPLACED).contains(&(site - start)) {
                return None;
            }
            let below = starts.iter().copied().chain([site]);
            let inside: Vec<usize> = below.filter(|at| (start + 1..start + LONG_JUMP).contains(at)).collect();
            let trap = |at: &usize| TRAPS_IF_ASKED.contains(&(at - start)) || TRAPS.contains(&(at - start));
            let all_trap = inside.iter().any(|at| TRAPS_IF_ASKED.contains(&(at - start)));
            inside.iter().all(trap).then(|| Plan {
                start,
                site,
                jump: start,
                all_trap,
                inside: inside.clone(),
            })
        };
        starts.iter().filter_map(plan).collect()
    }

    /// Returns a plan with a short jump in place of one instruction.
    fn by_stone(&self, page: &[u8; PAGE], site: usize) -> Option<Plan> {
        let last = self.movable().next()?;
        let start = last.ip() as usize;
        let behind = start + SHORT_JUMP;
        let jump = self.padding(page, site).into_iter().find(|jump| jump - behind <= 127)?;
        let plan = Plan { start, site, jump, all_trap: false, inside: Vec::new() };
        (last.len() >= SHORT_JUMP).then_some(plan)
    }

    /// Returns the offsets of padding that is long enough: NOPs after a return or a jump, up to an
    /// aligned address, without a near jump to them.
    fn padding(&self, page: &[u8; PAGE], site: usize) -> Vec<usize> {
        let end = (site + 144).min(PAGE);
        let code = &page[site + SYSCALL.len()..end];
        let start = (site + SYSCALL.len()) as u64;
        let behind: Vec<Instruction> = Decoder::with_ip(64, code, start, DecoderOptions::NONE)
            .iter()
            .take_while(|one| !one.is_invalid())
            .collect();
        let targets: Vec<u64> =
            self.instructions.iter().chain(&behind).map(Instruction::near_branch_target).collect();
        let mut found = Vec::new();
        let mut dead_from = None;
        for instruction in &behind {
            let at = instruction.ip() as usize;
            if is_padding(instruction) {
                continue;
            }
            if let Some(from) =
                dead_from.filter(|from| at - from >= LONG_JUMP && at.is_multiple_of(ALIGNMENT))
                && !targets.iter().any(|&target| (from as u64..at as u64).contains(&target))
            {
                found.push(from);
            }
            let ends = matches!(
                instruction.flow_control(),
                FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
            );
            dead_from = ends.then_some(instruction.next_ip() as usize);
        }
        found
    }
}

fn one(page: &[u8; PAGE], at: usize) -> Instruction {
    Decoder::with_ip(64, &page[at..], at as u64, DecoderOptions::NONE).decode()
}

fn is_padding(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
}

/// Returns true if an instruction means the same at any other address.
fn is_movable(instruction: &Instruction) -> bool {
    let is_known = matches!(
        instruction.mnemonic(),
        Mnemonic::Mov
            | Mnemonic::Movzx
            | Mnemonic::Movsx
            | Mnemonic::Movsxd
            | Mnemonic::Cdqe
            | Mnemonic::Lea
            | Mnemonic::Xor
            | Mnemonic::Or
            | Mnemonic::And
            | Mnemonic::Add
            | Mnemonic::Sub
            | Mnemonic::Cmp
            | Mnemonic::Test
    );
    let is_special = (0..instruction.op_count()).any(|operand| {
        instruction.op_kind(operand) == OpKind::Register
            && (instruction.op_register(operand).is_segment_register()
                || instruction.op_register(operand).is_cr()
                || instruction.op_register(operand).is_dr())
    });
    is_known
        && !is_special
        && !instruction.is_ip_rel_memory_operand()
        && instruction.code() != Code::INVALID
        && !instruction.has_lock_prefix()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The offset of a test's code.
    const AT: usize = 0x200;

    /// Makes a page of functions that end at once, with this code.
    fn page(code: &[u8]) -> [u8; PAGE] {
        // mov %rdi,%rax ; ret ; nop of 4
        const OTHER: [u8; 8] = [0x48, 0x89, 0xF8, 0xC3, 0x0F, 0x1F, 0x40, 0];
        let mut page: [u8; PAGE] = std::array::from_fn(|at| OTHER[at % OTHER.len()]);
        page[AT..AT + code.len()].copy_from_slice(code);
        page
    }

    fn planned(code: &[u8], site: usize) -> Result<Plan, Refusal> {
        plan(&page(code), AT + site, &[])
    }

    // mov $39,%eax ; syscall ; ret ; 8 bytes of whatever keeps in step
    const GETPID: &[u8] = &[0xB8, 39, 0, 0, 0, 0x0F, 0x05, 0xC3];
    // cmpb $0,(%rip) ; je +0x20 ; xor %eax,%eax ; syscall ; cmp $-4096,%rax ; ja +0x40 ; ret ; nop of 8
    const READ: &[u8] = &[
        0x80, 0x3D, 0, 0, 0, 0, 0, 0x74, 0x20, 0x31, 0xC0, 0x0F, 0x05, 0x48, 0x3D, 0, 0xF0, 0xFF, 0xFF, 0x77,
        0x40, 0xC3, 0x0F, 0x1F, 0x84, 0, 0, 0, 0, 0, 0x66, 0x90,
    ];

    #[test]
    fn the_usual_site_is_rewritten_in_place() {
        let plan = planned(GETPID, 5).unwrap();
        let (start, site) = (AT, AT + 5);
        assert_eq!(plan, Plan { start, site, jump: start, all_trap: false, inside: vec![site] });
        assert_eq!(plan.edits(0x3FEA_1230), [(AT, vec![0xFF, 0x24, 0x25, 0x30, 0x12, 0xEA, 0x3F])]);
        // What lies below the jump begins with a trap.
        assert!([0xEA, 0x3F].into_iter().all(is_trap));
    }

    #[test]
    fn a_short_one_goes_by_a_stone_and_its_system_call_stays() {
        let plan = planned(READ, 11).unwrap();
        assert_eq!((plan.start, plan.jump), (AT + 9, AT + 22));
        let edits = plan.edits(0x3FEA_0000);
        assert_eq!(edits[1], (AT + 9, vec![0xEB, 11]));
        assert!(!plan.ranges()[1].contains(&plan.site));
    }

    #[test]
    fn padding_that_is_jumped_to_or_executed_is_no_place_for_a_stone() {
        let mut jumped = READ.to_vec();
        // ja to the padding
        jumped[20] = 1;
        assert_eq!(planned(&jumped, 11), Err(Refusal::Immovable));
        let mut executed = READ.to_vec();
        // no return before it
        executed[21] = 0x90;
        assert_eq!(planned(&executed, 11), Err(Refusal::Immovable));
        let mut unaligned = READ.to_vec();
        unaligned[28..32].copy_from_slice(&[0xC3; 4]);
        assert_eq!(planned(&unaligned, 11), Err(Refusal::Immovable));
    }

    #[test]
    fn instructions_that_depend_on_their_address_are_left() {
        for before in [
            // mov (%rip),%eax ; call ; jmp ; push ; rdtsc and nops ; mov %fs,%eax and more
            &[0x8B, 0x05, 0, 0, 0, 0][..],
            &[0xE8, 0, 0, 0, 0],
            &[0xE9, 0, 0, 0, 0],
            &[0x50, 0x50, 0x50, 0x50, 0x50],
            &[0x0F, 0x31, 0x0F, 0x1F, 0x00],
            &[0x8E, 0xE0, 0x8C, 0xE0, 0x8E, 0xE0],
        ] {
            let code = [before, &SYSCALL, &[0xC3]].concat();
            assert_eq!(planned(&code, before.len()), Err(Refusal::Immovable), "{before:x?}");
        }
    }

    #[test]
    fn an_instruction_that_would_be_hit_where_no_trap_is_is_not_below_the_jump() {
        // xor %eax,%eax ; mov %rdi,%rsi ; syscall: the second begins at the jump's third byte.
        let code = [0x31, 0xC0, 0x48, 0x89, 0xFE, 0x0F, 0x05, 0xC3];
        assert_eq!(planned(&code, 5), Err(Refusal::Immovable));
        // mov %rdi,%rsi ; xor %eax,%eax ; syscall: at its fourth, where one can be.
        let code = [0x48, 0x89, 0xFE, 0x31, 0xC0, 0x0F, 0x05, 0xC3];
        let plan = planned(&code, 5).unwrap();
        assert!(plan.all_trap && plan.inside == [AT + 3, AT + 5], "{plan:?}");
    }

    #[test]
    fn the_return_from_a_signal_is_left_for_those_who_know_it_by_its_bytes() {
        let code = [0x48, 0xC7, 0xC0, 15, 0, 0, 0, 0x0F, 0x05];
        assert_eq!(planned(&code, 7), Err(Refusal::SignalReturn));
        let code = [0x48, 0xC7, 0xC0, 14, 0, 0, 0, 0x0F, 0x05];
        assert_eq!(planned(&code, 7).unwrap().start, AT);
    }

    #[test]
    fn bytes_within_other_instructions_are_no_site() {
        assert_eq!(planned(GETPID, 0), Err(Refusal::NoSite));
        let mut page = page(&[]);
        page[20..22].copy_from_slice(&SYSCALL);
        assert_eq!(plan(&page, 20, &[]), Err(Refusal::Edge));
        page[PAGE - 2..].copy_from_slice(&SYSCALL);
        assert_eq!(plan(&page, PAGE - 2, &[]), Err(Refusal::Edge));
        assert_eq!(plan(&page, PAGE - 1, &[]), Err(Refusal::NoSite));
    }

    /// The five bytes before look like an instruction, but are the end of a longer one. Decoding
    /// from an earlier place finds that.
    #[test]
    fn a_displacement_is_not_taken_for_an_instruction() {
        // movl $1,-0x48(%rsp): its end is mov $1,%eax
        let code = [0xC7, 0x44, 0x24, 0xB8, 1, 0, 0, 0, 0x0F, 0x05, 0xC3];
        assert_eq!(planned(&code, 8).unwrap().start, AT);
    }

    #[test]
    fn where_decoding_does_not_agree_nothing_is_rewritten() {
        let mut page = page(GETPID);
        // add %al,(%rax) over and over, in two steps that never meet.
        page[AT - 200..AT].fill(0);
        page[AT - 201] = 0xC3;
        assert_eq!(plan(&page, AT + 5, &[]), Err(Refusal::Unclear));
    }

    #[test]
    fn sites_do_not_share_bytes() {
        let page = page(GETPID);
        let first = plan(&page, AT + 5, &[]).unwrap();
        assert_eq!(plan(&page, AT + 5, &first.ranges()), Err(Refusal::Immovable));
    }
}
