//! Patterns in general registers, flags, selectors and the bases of FS and GS. The processor spins
//! with them, with no system call in between.

use core::arch::{asm, naked_asm};

use crate::{Result, cpus, report::Report, rng::Rng, stop::Stop};

const ROUNDS: u64 = 100_000;
const CARRY: u64 = 1;
const DIRECTION: u64 = 1 << 10;
const ALIGNMENT_CHECK: u64 = 1 << 18;
const IDENTIFICATION: u64 = 1 << 21;
/// Flags that outlast the arithmetic of the loop, and that user mode may set. The resume and trap
/// flags, the privilege level and the like must stay clear.
const CHOSEN: u64 = CARRY | DIRECTION | ALIGNMENT_CHECK | IDENTIFICATION;
const COMPARED: u64 = CHOSEN | 1 << 8 | 1 << 9 | 3 << 12 | 1 << 14 | 1 << 16 | 1 << 17;
const INTERRUPTS: u64 = 1 << 9;
const USER_DATA: u16 = 0x2B;
const ARCH_SET_GS: i32 = 0x1001;

/// All registers but RSP, which is in use, and RAX, which holds the address of this structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers {
    rbx: u64,
    rcx: u64,
    rdx: u64,
    rsi: u64,
    rdi: u64,
    rbp: u64,
    more: [u64; 8],
    flags: u64,
}

impl Registers {
    fn random(rng: &mut Rng) -> Self {
        Self {
            rbx: rng.next(),
            rcx: rng.next(),
            rdx: rng.next(),
            rsi: rng.next(),
            rdi: rng.next(),
            rbp: rng.next(),
            more: std::array::from_fn(|_| rng.next()),
            flags: rng.next() & CHOSEN | INTERRUPTS | 2,
        }
    }

    fn comparable(mut self) -> Self {
        self.flags &= COMPARED;
        self
    }
}

/// Spins on each CPU.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    cpus::on_each(stop, report, |cpu, stop, report| {
        let mut rng = Rng::new(cpu as u64);
        let gs = rng.next() >> 17;
        set_gs_base(gs)?;
        set_data_segments(USER_DATA);
        let selectors = selectors();
        let fs_word = fs_word();
        while !stop.is_set() {
            let before = Registers::random(&mut rng);
            let mut after = before;
            // SAFETY: the function keeps what the calling convention asks it to keep.
            unsafe { spin_with(&raw mut after, ROUNDS) };
            let (before, after) = (before.comparable(), after.comparable());
            report.check(before == after, || format!("CPU {cpu}: {before:x?} became {after:x?}"));
            let now = self::selectors();
            report.check(now == selectors, || format!("CPU {cpu}: selectors {selectors:x?} became {now:x?}"));
            report.check(self::fs_word() == fs_word, || format!("CPU {cpu}: FS has moved"));
            let base = gs_base();
            report.check(base == gs, || format!("CPU {cpu}: GS base {gs:#x} became {base:#x}"));
            report.pass();
        }
        set_data_segments(0);
        Ok(())
    })
}

/// Loads all registers from `*registers`, spins `rounds` times, and stores the registers there
/// again. The counter is on the stack, so every register has a pattern.
#[unsafe(naked)]
unsafe extern "C" fn spin_with(registers: *mut Registers, rounds: u64) {
    naked_asm!(
        "push rbx; push rbp; push r12; push r13; push r14; push r15",
        "push rdi",
        "push rsi",
        "mov rax, rdi",
        "push qword ptr [rax + 112]",
        "mov rbx, [rax]; mov rcx, [rax + 8]; mov rdx, [rax + 16]",
        "mov rsi, [rax + 24]; mov rdi, [rax + 32]; mov rbp, [rax + 40]",
        "mov r8, [rax + 48]; mov r9, [rax + 56]; mov r10, [rax + 64]; mov r11, [rax + 72]",
        "mov r12, [rax + 80]; mov r13, [rax + 88]; mov r14, [rax + 96]; mov r15, [rax + 104]",
        // RAX has a pattern too while the loop spins.
        "not rax",
        "popfq",
        "2: dec qword ptr [rsp]",
        "jnz 2b",
        "pushfq",
        "not rax",
        "cmp rax, [rsp + 16]",
        "jne 3f",
        "mov [rax], rbx; mov [rax + 8], rcx; mov [rax + 16], rdx",
        "mov [rax + 24], rsi; mov [rax + 32], rdi; mov [rax + 40], rbp",
        "mov [rax + 48], r8; mov [rax + 56], r9; mov [rax + 64], r10; mov [rax + 72], r11",
        "mov [rax + 80], r12; mov [rax + 88], r13; mov [rax + 96], r14; mov [rax + 104], r15",
        "pop qword ptr [rax + 112]",
        "add rsp, 16",
        // The calling convention requires these flags to be clear, and so does code that is not
        // aligned.
        "push 2",
        "popfq",
        "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
        "ret",
        // RAX was destroyed.
        "3: ud2",
    )
}

fn set_gs_base(base: u64) -> Result<()> {
    // SAFETY: nothing in this process uses GS.
    cpus::check(unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) } as i32)?;
    Ok(())
}

/// Reads GS's base from the kernel, whether or not RDGSBASE may be used.
fn gs_base() -> u64 {
    const ARCH_GET_GS: i32 = 0x1004;
    let mut base = 0u64;
    // SAFETY: the kernel writes one word.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_GS, &raw mut base) };
    base
}

/// Reads the thread's own address from the thread control block.
fn fs_word() -> u64 {
    let word: u64;
    // SAFETY: the C library keeps a pointer to the control block at its start.
    unsafe { asm!("mov {}, fs:[0]", out(reg) word, options(nostack, readonly)) };
    word
}

fn set_data_segments(selector: u16) {
    // SAFETY: 64-bit code ignores DS and ES.
    unsafe { asm!("mov ds, {0:e}", "mov es, {0:e}", in(reg) u32::from(selector), options(nostack)) };
}

/// Reads ES, CS, SS, DS, FS and GS.
fn selectors() -> [u16; 6] {
    let [es, cs, ss, ds, fs, gs]: [u32; 6];
    // SAFETY: reads registers.
    unsafe {
        asm!(
            "mov {0:e}, es", "mov {1:e}, cs", "mov {2:e}, ss",
            "mov {3:e}, ds", "mov {4:e}, fs", "mov {5:e}, gs",
            out(reg) es, out(reg) cs, out(reg) ss, out(reg) ds, out(reg) fs, out(reg) gs,
            options(nostack, nomem, preserves_flags),
        );
    }
    [es, cs, ss, ds, fs, gs].map(|selector| selector as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_come_back_as_they_went() {
        let mut rng = Rng::new(3);
        for _ in 0..10 {
            let before = Registers::random(&mut rng);
            let mut after = before;
            // SAFETY: as in `run`.
            unsafe { spin_with(&raw mut after, 1000) };
            assert_eq!(before.comparable(), after.comparable());
        }
    }
}
