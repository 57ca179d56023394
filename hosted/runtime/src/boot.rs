//! The boot parameters of a kernel: memory, initial file system, command line
//! (Documentation/arch/x86/boot.rst). And the processor's state as the kernel's own assembler would
//! have left it.

use crate::{
    block::{self, Segments},
    error::{Error, Result},
    kernel::Kernel,
    layout::{DIRECT_MAP, PAGE},
    load::{self, Loaded},
    machine::{Exception, Machine},
    memory::Memory,
    smp::apic,
    vcpu::{CR0, CR4, EFER, Table, Vcpu},
};

/// The place of these structures, in memory below 640 KiB that the guest may use again afterwards.
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

/// Returns the command line of every hosted kernel: devices that it need not search for, the clock's
/// frequency, and the devices that it has. The user's words are last. After a `--` among them the kernel
/// takes no option.
#[must_use]
pub fn command_line(devices: &str, append: &str, clock_khz: u64, processors: usize) -> String {
    let one = if processors == 1 { " nolapic nosmp" } else { "" };
    let own = format!(
        "console=ttyS0 acpi=off pci=off noapic{one} mitigations=off tsc=reliable tsc_early_khz={clock_khz} \
         rodata=off panic=-1{devices}"
    );
    if append.is_empty() { own } else { format!("{own} {append}") }
}

fn little() -> Error {
    Error::new("the guest has too little memory").hint("give the guest more with --memory")
}

/// Puts the initial file system into memory.
///
/// # Errors
/// If there is too little memory.
pub fn put_initramfs(memory: &Memory, kernel: &Kernel, initramfs: &[u8]) -> Result<()> {
    let at = memory.ram().min(LOW).checked_sub(initramfs.len() as u64).map(|at| at & !(PAGE - 1));
    let at = at.filter(|at| *at >= kernel.end().next_multiple_of(MIB)).ok_or_else(little)?;
    if initramfs.is_empty() {
        return Ok(());
    }
    let put = |offset: u64, number: u64| {
        memory.write(PARAMETERS + offset, &(number as u32).to_le_bytes()).ok_or_else(little)
    };
    memory.write(at, initramfs).ok_or_else(little)?;
    put(offset::RAMDISK_IMAGE, at)?;
    put(offset::RAMDISK_SIZE, initramfs.len() as u64)
}

/// Puts the other parameters into memory.
///
/// # Errors
/// If there is too little of it, or the command line is too long.
pub fn describe(memory: &Memory, line: &str) -> Result<()> {
    if line.len() > LONGEST_COMMAND_LINE {
        return Err(Error::new(format!(
            "the kernel's command line is longer than {LONGEST_COMMAND_LINE} bytes"
        ))
        .hint("shorten what you give with --append, or read it from a file in the machine"));
    }
    let put = |offset: u64, bytes: &[u8]| memory.write(PARAMETERS + offset, bytes).ok_or_else(little);
    put(offset::BOOT_FLAG, &0xAA55_u16.to_le_bytes())?;
    put(offset::HEADER, b"HdrS\x0f\x02")?;
    put(offset::TYPE_OF_LOADER, &[0xFF])?;
    put(offset::COMMAND_LINE, &(COMMAND_LINE as u32).to_le_bytes())?;
    memory.write(COMMAND_LINE, line.as_bytes()).ok_or_else(little)?;
    let map = memory_map(memory.ram());
    put(offset::E820_ENTRIES, &[map.len() as u8])?;
    let mut table = Vec::new();
    for (start, length, kind) in map {
        table.extend(u64::to_le_bytes(start));
        table.extend(u64::to_le_bytes(length));
        table.extend(u32::to_le_bytes(kind));
    }
    put(offset::E820_TABLE, &table)
}

const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// Returns the memory map. There is no memory at the addresses of interrupt controllers.
fn memory_map(size: u64) -> Vec<(u64, u64, u32)> {
    let mut map = vec![(0, LOW_END, RAM), (LOW_END, MIB - LOW_END, RESERVED)];
    let behind = apic::BASE + apic::SIZE;
    map.push((MIB, size.min(apic::BASE) - MIB, RAM));
    if size > behind {
        map.extend([(apic::BASE, apic::SIZE, RESERVED), (behind, size - behind, RAM)]);
    }
    map
}

/// The places at which a kernel searches for a table of processors, and of the table.
const POINTER: u64 = 0xF_0000;
const TABLE: u64 = POINTER + 0x20;

/// Puts the table of processors into memory (Intel's MultiProcessor Specification 1.4).
///
/// # Errors
/// If there is too little memory.
pub fn describe_processors(memory: &Memory, count: usize) -> Result<()> {
    let (pointer, table) = processors(count);
    memory.write(POINTER, &pointer).and_then(|()| memory.write(TABLE, &table)).ok_or_else(little)
}

/// Makes the pointer to the table, and the table.
fn processors(count: usize) -> (Vec<u8>, Vec<u8>) {
    const VERSION: u8 = 4;
    const ENABLED: u8 = 1;
    const FIRST: u8 = 2;
    const EXTERNAL: u8 = 3;
    const EVERYBODY: u8 = 0xFF;
    let mut entries: Vec<Vec<u8>> = Vec::new();
    for number in 0..count {
        let flags = if number == 0 { ENABLED | FIRST } else { ENABLED };
        entries.push([&[0, number as u8, 0x14, flags][..], &[0; 16]].concat());
    }
    // The only interrupt controllers for devices are the old ones, whose one line goes to the first
    // processor.
    entries.push([&[1, 0][..], b"ISA   "].concat());
    entries.push(vec![3, EXTERNAL, 0, 0, 0, 0, EVERYBODY, 0]);
    entries.push(vec![4, EXTERNAL, 0, 0, 0, 0, EVERYBODY, 0]);
    let body = entries.concat();
    let mut table = b"PCMP".to_vec();
    table.extend((44 + body.len() as u16).to_le_bytes());
    table.extend([VERSION, 0]);
    table.extend(b"MERCURY HOSTED      ");
    table.extend([0; 6]);
    table.extend((entries.len() as u16).to_le_bytes());
    table.extend((apic::BASE as u32).to_le_bytes());
    table.extend([0; 4]);
    table.extend(body);
    let mut pointer = b"_MP_".to_vec();
    pointer.extend((TABLE as u32).to_le_bytes());
    pointer.extend([1, VERSION, 0, 0, 0, 0, 0, 0]);
    for (bytes, sum) in [(&mut pointer, 10), (&mut table, 7)] {
        bytes[sum] = bytes.iter().fold(0, |sum, byte| sum.wrapping_sub(*byte));
    }
    (pointer, table)
}

/// The places from which a starting processor's first state is read. The kernel's own assembler
/// would read them.
#[derive(Clone, Copy, Debug)]
pub struct Bringup {
    code: u64,
    stack: u64,
    base: u64,
    descriptors: u64,
    root: u64,
}

impl Bringup {
    /// A kernel's.
    ///
    /// # Errors
    /// If the kernel does not have these variables.
    pub fn of(kernel: &Kernel, loaded: &Loaded) -> Result<Self> {
        let at = |symbol| {
            load::address_of(kernel, symbol)
                .map_err(|error| error.hint("use a kernel of 6.1 with SMP=y, or leave out --cpus"))
        };
        Ok(Self {
            code: at("initial_code")?,
            stack: at("initial_stack")?,
            base: at("initial_gs")?,
            descriptors: at("early_gdt_descr")?,
            root: loaded.root,
        })
    }

    /// Makes the processor begin so.
    ///
    /// # Errors
    /// If something is not mapped.
    pub fn begin(&self, machine: &mut Machine) -> std::result::Result<(), Exception> {
        let base = machine.read_long(self.descriptors.wrapping_add(2))?;
        machine.begin_with(first_state(base, self.root));
        let stack = machine.read_long(self.stack)? - 8;
        let rip = machine.read_long(self.code)?;
        let gs = machine.read_long(self.base)?;
        // There is nothing to return to.
        machine.write(stack, &[0; 8])?;
        begin_at(machine, rip, stack, gs);
        Ok(())
    }
}

fn first_state(descriptors: u64, root: u64) -> Vcpu {
    Vcpu {
        cr0: CR0,
        cr3: root,
        cr4: CR4,
        efer: EFER,
        gdt: Table { base: descriptors, limit: 127 },
        xcr0: 1,
        ..Vcpu::default()
    }
}

fn begin_at(machine: &Machine, rip: u64, stack: u64, base: u64) {
    const KERNEL_CODE: u16 = 0x10;
    const KERNEL_DATA: u16 = 0x18;
    let block = machine.block();
    block.segments.set(Segments { cs: KERNEL_CODE, ss: KERNEL_DATA });
    block.fs.set(0);
    block.gs.set(base);
    block.gs_other.set(0);
    block.flags.set(2);
    block.registers.general.iter().for_each(|register| register.set(0));
    block.registers.rip.set(rip);
    block.registers.rflags.set(0x202);
    block.registers.general[block::RSP].set(stack);
}

/// Makes the first code of the guest. It does the rest of the kernel's way to its first function in
/// C, for which the kernel would build page tables.
///
/// # Errors
/// If the kernel has not the functions that it needs.
pub fn stub(kernel: &Kernel, at: u64) -> Result<Vec<u8>> {
    use iced_x86::code_asm::{CodeAssembler, rdi};
    let wrong =
        |error: iced_x86::IcedError| Error::bug(format!("cannot make the code to start with: {error}"));
    let mut assembler = CodeAssembler::new(64).map_err(wrong)?;
    assembler.call(load::address_of(kernel, "idt_setup_early_handler")?).map_err(wrong)?;
    assembler.mov(rdi, PARAMETERS).map_err(wrong)?;
    assembler.call(load::address_of(kernel, "x86_64_start_reservations")?).map_err(wrong)?;
    assembler.ud2().map_err(wrong)?;
    assembler.assemble(at).map_err(wrong)
}

/// The state in which the first processor begins: long mode, with the kernel's first stack,
/// descriptors and page tables.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    entry: u64,
    stack: u64,
    percpu: u64,
    descriptors: u64,
    root: u64,
}

impl Beginning {
    /// A kernel's, with its first code at `entry`.
    ///
    /// # Errors
    /// If the kernel has not the symbols that it needs.
    pub fn of(kernel: &Kernel, loaded: &Loaded, entry: u64) -> Result<Self> {
        /// Registers and more are kept at the stack's end.
        const FRAME: u64 = 0x100;
        let percpu = load::address_of(kernel, "__per_cpu_load")?;
        let (stack, _) = kernel.find("init_thread_union")?;
        Ok(Self {
            entry,
            stack: stack.wrapping_add(load::DISTANCE) + stack_size(kernel)? - FRAME,
            percpu,
            descriptors: percpu.wrapping_add(kernel.symbol("gdt_page")?),
            root: loaded.root,
        })
    }

    /// Makes the processor begin so.
    pub fn begin(&self, machine: &mut Machine) {
        machine.begin_with(first_state(self.descriptors, self.root));
        begin_at(machine, self.entry, self.stack, self.percpu);
        debug_assert!(machine.is_direct(self.descriptors) && self.descriptors >= DIRECT_MAP);
    }
}

/// Returns the size of the kernel's stacks. It is the distance between these symbols, a power of
/// two.
fn stack_size(kernel: &Kernel) -> Result<u64> {
    let (start, size) = kernel.find("init_thread_union")?;
    if size > 0 {
        return Ok(size);
    }
    let end = kernel.symbol("__end_init_task")?;
    Ok((end - start).min(16 << 10))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A machine with arguments for its first program once had no disks: their description came after them.
    #[test]
    fn devices_are_described_before_the_arguments_of_the_first_program() {
        let line = command_line(" virtio_mmio.device=1", "init=/bin/sh -- one", 1, 1);
        assert!(line.contains(" virtio_mmio.device=1 ") && line.ends_with(" init=/bin/sh -- one"), "{line}");
        assert!(command_line(" virtio_mmio.device=1", "", 1, 1).ends_with(" virtio_mmio.device=1"));
    }

    #[test]
    fn there_is_no_memory_where_interrupt_controllers_are() {
        for size in [64 * MIB, apic::BASE, 8 << 30] {
            let map = memory_map(size);
            assert_eq!(map.iter().map(|(_, length, _)| length).sum::<u64>(), size);
            let is_ram =
                |at| map.iter().any(|&(from, length, kind)| kind == RAM && at >= from && at - from < length);
            assert!(is_ram(MIB) && is_ram(size - 1) && !is_ram(size));
            assert!((apic::BASE..apic::BASE + apic::SIZE).step_by(PAGE as usize).all(|at| !is_ram(at)));
        }
    }

    #[test]
    fn the_table_of_processors_is_as_long_as_it_says_and_its_sums_are_right() {
        for count in 1..=8 {
            let (pointer, table) = processors(count);
            assert_eq!((pointer.len(), &pointer[..4], pointer[8]), (16, &b"_MP_"[..], 1));
            assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            assert_eq!(table.len(), 44 + 20 * count + 3 * 8);
            assert_eq!((usize::from(table[34]), table[44 + 3]), (count + 3, 3));
            for bytes in [pointer, table] {
                assert_eq!(bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            }
        }
    }
}
