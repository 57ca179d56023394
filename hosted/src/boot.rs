//! What a boot loader tells a kernel: memory, initial file system, command line (Documentation/arch/x86/boot.rst), and the
//! processor as the kernel's own assembler would have left it.

use crate::{
    block::{self, Registers, Segments},
    error::{Error, Result},
    kernel::Kernel,
    layout::{DIRECT_MAP, PAGE},
    load::{self, Loaded},
    machine::Machine,
    memory::Memory,
    vcpu::{CR0, CR4, EFER, Table, Vcpu},
};

/// Where these structures are: in memory below 640 KiB that the guest may use again afterwards.
const PARAMETERS: u64 = 0x9_0000;
const COMMAND_LINE: u64 = 0x9_2000;
/// Longer ones are cut off by the kernel.
const LONGEST_COMMAND_LINE: usize = 2047;
const LOW_END: u64 = 0x9_F000;
const MIB: u64 = 1 << 20;
/// The initial file system has to lie below, because its address has 32 bits.
const LOW: u64 = 2 << 30;

/// Offsets in the structure.
mod offset {
    pub const E820_ENTRIES: u64 = 0x1E8;
    pub const BOOT_FLAG: u64 = 0x1FE;
    pub const HEADER: u64 = 0x202;
    pub const TYPE_OF_LOADER: u64 = 0x210;
    pub const RAMDISK_IMAGE: u64 = 0x218;
    pub const RAMDISK_SIZE: u64 = 0x21C;
    pub const COMMAND_LINE: u64 = 0x228;
    pub const E820_TABLE: u64 = 0x2D0;
}

/// What every hosted kernel is told: what it need not look for, and the clock's frequency.
#[must_use]
pub fn command_line(append: &str, clock_khz: u64) -> String {
    let own = format!(
        "console=ttyS0 acpi=off pci=off noapic nolapic nosmp mitigations=off tsc=reliable tsc_early_khz={clock_khz} \
         rodata=off panic=-1"
    );
    if append.is_empty() { own } else { format!("{own} {append}") }
}

/// Puts it all into memory.
///
/// # Errors
/// If there is too little of it, or the command line is too long.
pub fn describe(memory: &Memory, kernel: &Kernel, line: &str, initramfs: &[u8]) -> Result<()> {
    if line.len() > LONGEST_COMMAND_LINE {
        return Err(Error::new(format!(
            "the kernel's command line is longer than {LONGEST_COMMAND_LINE} bytes"
        )));
    }
    let little = || Error::new("the guest has too little memory").hint("give it more with --memory");
    let at = memory.size().min(LOW).checked_sub(initramfs.len() as u64).map(|at| at & !(PAGE - 1));
    let at = at.filter(|at| *at >= kernel.end().next_multiple_of(MIB)).ok_or_else(little)?;
    let put = |offset: u64, bytes: &[u8]| memory.write(PARAMETERS + offset, bytes).ok_or_else(little);
    put(offset::BOOT_FLAG, &0xAA55_u16.to_le_bytes())?;
    put(offset::HEADER, b"HdrS\x0f\x02")?;
    put(offset::TYPE_OF_LOADER, &[0xFF])?;
    if !initramfs.is_empty() {
        memory.write(at, initramfs).ok_or_else(little)?;
        put(offset::RAMDISK_IMAGE, &(at as u32).to_le_bytes())?;
        put(offset::RAMDISK_SIZE, &(initramfs.len() as u32).to_le_bytes())?;
    }
    put(offset::COMMAND_LINE, &(COMMAND_LINE as u32).to_le_bytes())?;
    memory.write(COMMAND_LINE, line.as_bytes()).ok_or_else(little)?;
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let map = [(0, LOW_END, RAM), (LOW_END, MIB - LOW_END, RESERVED), (MIB, memory.size() - MIB, RAM)];
    put(offset::E820_ENTRIES, &[map.len() as u8])?;
    let mut table = Vec::new();
    for (start, length, kind) in map {
        table.extend(u64::to_le_bytes(start));
        table.extend(u64::to_le_bytes(length));
        table.extend(u32::to_le_bytes(kind));
    }
    put(offset::E820_TABLE, &table)
}

/// A stub that does what is left of the kernel's way to its first function in C, for which it would build page tables.
///
/// # Errors
/// If the kernel has not the functions that it needs.
pub fn stub(kernel: &Kernel, at: u64) -> Result<Vec<u8>> {
    use iced_x86::code_asm::{CodeAssembler, rdi};
    let wrong =
        |error: iced_x86::IcedError| Error::new(format!("cannot make the code to start with: {error}"));
    let mut assembler = CodeAssembler::new(64).map_err(wrong)?;
    assembler.call(load::address_of(kernel, "idt_setup_early_handler")?).map_err(wrong)?;
    assembler.mov(rdi, PARAMETERS).map_err(wrong)?;
    assembler.call(load::address_of(kernel, "x86_64_start_reservations")?).map_err(wrong)?;
    assembler.ud2().map_err(wrong)?;
    assembler.assemble(at).map_err(wrong)
}

/// The processor in long mode, with the kernel's first stack, descriptors and page tables.
///
/// # Errors
/// If the kernel has not the symbols that it needs.
pub fn processor(machine: &mut Machine, kernel: &Kernel, loaded: &Loaded, entry: u64) -> Result<()> {
    const KERNEL_CODE: u16 = 0x10;
    const KERNEL_DATA: u16 = 0x18;
    /// Registers and more are kept at the stack's end.
    const FRAME: u64 = 0x100;
    let percpu = load::address_of(kernel, "__per_cpu_load")?;
    let gdt = percpu.wrapping_add(kernel.symbol("gdt_page")?);
    let (stack, _) = kernel.find("init_thread_union")?;
    let stack_size = stack_size(kernel)?;
    machine.vcpu = Vcpu {
        cr0: CR0,
        cr3: loaded.root,
        cr4: CR4,
        efer: EFER,
        gdt: Table { base: gdt, limit: 127 },
        xcr0: 1,
        ..Vcpu::default()
    };
    let block = machine.block();
    block.segments = Segments { cs: KERNEL_CODE, ss: KERNEL_DATA };
    block.gs = percpu;
    block.gs_other = 0;
    block.flags = 2;
    block.registers = Registers { rip: entry, rflags: 0x202, ..Registers::default() };
    block.registers.general[block::RSP] = stack.wrapping_add(load::DISTANCE) + stack_size - FRAME;
    debug_assert!(machine.memory.direct(gdt).is_some() && gdt >= DIRECT_MAP);
    Ok(())
}

/// The kernel's stacks are as large as what lies between these, a power of two.
fn stack_size(kernel: &Kernel) -> Result<u64> {
    let (start, size) = kernel.find("init_thread_union")?;
    if size > 0 {
        return Ok(size);
    }
    let end = kernel.symbol("__end_init_task")?;
    Ok((end - start).min(16 << 10))
}
