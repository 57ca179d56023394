//! A process with a local descriptor table. DS and ES hold its selectors while 64-bit code spins.
//! 32-bit code runs in one of its segments and reads through the bases of two others.
//!
//! The ways there and back are far jumps. QEMU 7.2 reads the stack for a far return in user mode as
//! if it were the kernel, which SMAP forbids.

use core::arch::asm;
use std::{io, ptr, sync::Mutex};

use crate::{Result, cpus, report::Report, rng::Rng, stop::Stop};

const PAGE: usize = 4096;
const ENTRIES_PER_CPU: u32 = 3;
const SPINS: u64 = 40_000;
const CALLS: u32 = 20_000;
/// Offsets in the page with all 32-bit code and data.
const CODE: usize = 0;
const RETURN: usize = 0x80;
const ENTRY: usize = 0xE0;
const SAVED_RSP: usize = 0xF0;
const DATA: [usize; 2] = [0x200, 0x400];
/// Linux's selector of 64-bit user code.
const USER_CODE: u16 = 0x33;

/// The 32-bit code. Its input is: EDI rounds; ESI the selector for DS and ES; ECX the word at DS:0;
/// EDX the word at ES:4. It ends with EBX = 0 if all was right, in a far jump whose target follows.
#[rustfmt::skip]
const CODE_32: &[u8] = &[
    0x8E, 0xDE,                                 // mov ds, esi
    0x8E, 0xC6,                                 // mov es, esi
    0x89, 0xFB,                                 // mov ebx, edi
    // again:
    0xA1, 0x00, 0x00, 0x00, 0x00,               // mov eax, [0]
    0x39, 0xC8,                                 // cmp eax, ecx
    0x75, 0x0D,                                 // jne end
    0x26, 0xA1, 0x04, 0x00, 0x00, 0x00,         // mov eax, es:[4]
    0x39, 0xD0,                                 // cmp eax, edx
    0x75, 0x03,                                 // jne end
    0x4B,                                       // dec ebx
    0x75, 0xEA,                                 // jnz again
    // end:
    0xEA,                                       // ljmp …
];

/// Returns the operand of a far jump.
fn far_pointer(offset: u32, selector: u16) -> [u8; 6] {
    let mut pointer = [0; 6];
    pointer[..4].copy_from_slice(&offset.to_le_bytes());
    pointer[4..].copy_from_slice(&selector.to_le_bytes());
    pointer
}

/// Returns the 64-bit code of the way back. The high halves of registers may have been lost.
fn code_64(saved_rsp: u32) -> Vec<u8> {
    let mut code = vec![0x48, 0x8B, 0x24, 0x25]; // mov rsp, [saved_rsp]
    code.extend(saved_rsp.to_le_bytes());
    code.push(0xC3); // ret
    code
}

/// Runs on each CPU. The table is one of the process; each CPU has its own entries.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    // A change replaces the whole table.
    let table = Mutex::new(());
    cpus::on_each(stop, report, |cpu, stop, report| {
        let mut rng = Rng::new(cpu as u64);
        let page = LowPage::new()?;
        let first = cpu as u32 * ENTRIES_PER_CPU;
        let (code, data) =
            (Entry::code(first), [Entry::data(first + 1, &page, 0), Entry::data(first + 2, &page, 1)]);
        set(&table, &code)?;
        while !stop.is_set() {
            let words = [0, 1].map(|which| page.fill(which, &mut rng));
            for (entry, words) in data.iter().zip(words) {
                set(&table, entry)?;
                let kept = hold_in_64_bit(entry.selector(), data[0].selector());
                report.check(kept, || format!("CPU {cpu}: DS or ES lost its selector"));
                let bad = page.call_32_bit(&code, entry, words);
                report.check(bad == 0, || format!("CPU {cpu}: 32-bit code stopped {bad} rounds early"));
            }
            report.pass();
        }
        Ok(())
    })
}

/// The structure `user_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u32,
    base: u32,
    limit: u32,
    /// Flags: 32-bit; kind of contents; read-only; limit in pages; absent; usable; 64-bit.
    flags: u32,
}

impl Entry {
    /// Returns flat 32-bit code.
    fn code(number: u32) -> Self {
        Self { number, base: 0, limit: 0xF_FFFF, flags: 1 | 2 << 1 | 1 << 4 | 1 << 6 }
    }

    /// Returns one of the page's two data areas, with exactly its size.
    fn data(number: u32, page: &LowPage, which: usize) -> Self {
        Self { number, base: page.address(DATA[which]), limit: 0xFF, flags: 1 | 1 << 6 }
    }

    fn selector(self) -> u16 {
        (self.number << 3 | 7) as u16
    }
}

fn set(table: &Mutex<()>, entry: &Entry) -> Result<()> {
    const WRITE: i32 = 0x11;
    let _guard = table.lock().map_err(|_| "a thread panicked")?;
    // SAFETY: the kernel reads one entry.
    let result =
        unsafe { libc::syscall(libc::SYS_modify_ldt, WRITE, ptr::from_ref(entry), size_of::<Entry>()) };
    // The result is an int, in a register whose high half is not sign-extended.
    match result as i32 {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error).into()),
    }
}

/// Returns true if DS and ES keep their selectors through a spin.
fn hold_in_64_bit(ds: u16, es: u16) -> bool {
    let (ds_after, es_after): (u32, u32);
    // SAFETY: 64-bit code ignores DS and ES; both are null again at the end.
    unsafe {
        asm!(
            "mov ds, {ds:e}",
            "mov es, {es:e}",
            "2: dec {rounds}",
            "jnz 2b",
            "mov {ds:e}, ds",
            "mov {es:e}, es",
            "mov ds, {rounds:e}",
            "mov es, {rounds:e}",
            ds = inout(reg) u32::from(ds) => ds_after,
            es = inout(reg) u32::from(es) => es_after,
            rounds = inout(reg) SPINS => _,
            options(nostack),
        );
    }
    (ds_after, es_after) == (u32::from(ds), u32::from(es))
}

/// A page below 2 GiB with 32-bit code, its stack and its data.
struct LowPage(*mut u8);

impl LowPage {
    fn new() -> Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
        // SAFETY: a new mapping.
        let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().into());
        }
        let page = Self(page.cast());
        page.write(CODE, CODE_32);
        page.write(CODE + CODE_32.len(), &far_pointer(page.address(RETURN), USER_CODE));
        page.write(RETURN, &code_64(page.address(SAVED_RSP)));
        Ok(page)
    }

    fn address(&self, offset: usize) -> u32 {
        self.0 as u32 + offset as u32
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= PAGE);
        // SAFETY: within the page, which only this thread uses.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(offset), bytes.len()) };
    }

    /// Fills a data area with new words at 0 and at 4.
    fn fill(&self, which: usize, rng: &mut Rng) -> [u32; 2] {
        let words = [rng.next() as u32, rng.next() as u32];
        self.write(DATA[which], &words[0].to_le_bytes());
        self.write(DATA[which] + 4, &words[1].to_le_bytes());
        words
    }

    /// Jumps into 32-bit code and back. Returns 0, or the number of rounds left at an error.
    fn call_32_bit(&self, code: &Entry, data: &Entry, words: [u32; 2]) -> u32 {
        self.write(ENTRY, &far_pointer(self.address(CODE), code.selector()));
        let left: u32;
        // SAFETY: the page holds the code that is entered, which uses no stack; the way back takes this
        // stack again, on which everything is that the calling convention wants kept.
        unsafe {
            asm!(
                "push rbx; push rbp; push r12; push r13; push r14; push r15",
                "lea rax, [rip + 3f]",
                "push rax",
                "mov [r8], rsp",
                "jmp fword ptr [r9]",
                "3:",
                "mov eax, ebx",
                "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
                "mov ecx, 0",
                "mov ds, ecx",
                "mov es, ecx",
                in("r8") u64::from(self.address(SAVED_RSP)),
                in("r9") u64::from(self.address(ENTRY)),
                in("rdi") u64::from(CALLS),
                in("rsi") u64::from(data.selector()),
                in("rcx") u64::from(words[0]),
                in("rdx") u64::from(words[1]),
                lateout("rax") left,
                clobber_abi("C"),
            );
        }
        left
    }
}

impl Drop for LowPage {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn code_fits_between_its_neighbours() {
        assert!(CODE + CODE_32.len() + 6 <= RETURN);
        assert!(RETURN + code_64(0).len() <= ENTRY);
        const { assert!(ENTRY + 6 <= SAVED_RSP) };
    }

    #[test]
    fn thirty_two_bit_code_reads_through_the_base() {
        let page = LowPage::new().unwrap();
        let (code, data) = (Entry::code(0), Entry::data(1, &page, 0));
        let table = Mutex::new(());
        if set(&table, &code).is_err() {
            return; // a kernel without local descriptor tables
        }
        set(&table, &data).unwrap();
        let words = page.fill(0, &mut Rng::new(1));
        assert!(hold_in_64_bit(data.selector(), data.selector()));
        assert_eq!(page.call_32_bit(&code, &data, words), 0);
        assert_eq!(page.call_32_bit(&code, &data, [words[0], words[1] ^ 1]), CALLS);
    }
}
