//! Puts a kernel into memory: moves it, gives it its layout, fills its slots.

use std::collections::{BTreeMap, HashSet};

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use mercury_afterburner::record::Record;

use crate::{
    constants::{self, Function, SPECIAL},
    error::{Error, Result},
    kernel::{Change, Kernel},
    layout::{self, DIRECT_MAP, KERNEL_TABLES, PAGE, THUNKS, THUNKS_SIZE, USER_START, VMALLOC, VMEMMAP},
    memory::Memory,
    mmu::bits,
    run::Isolation,
    thunks::{self, Exit, HOOK_LENGTH, Slot, Thunk, USES, Use},
    user_access::{self, Fixed, UserAccess},
};

/// The linked address of physical address 0.
const LINKED: u64 = 0xFFFF_FFFF_8000_0000;
/// The distance by which addresses of the image grow.
pub const DISTANCE: u64 = DIRECT_MAP.wrapping_sub(LINKED);
/// Code of a slot begins at such a multiple.
const ALIGNMENT: usize = 16;

/// A kernel that was loaded into memory.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The code for slots, to be put at [`THUNKS`].
    pub thunks: Vec<u8>,
    /// Places where it leaves the guest.
    pub exits: Vec<Exit>,
    /// Slots that were filled, by their addresses now.
    pub slots: BTreeMap<u64, Filled>,
    /// Instructions that have become jumps or traps, because they use programs' memory.
    pub accesses: Vec<UserAccess>,
    /// Instructions that such a jump has displaced.
    pub displaced: Vec<UserAccess>,
    /// Physical address of the kernel's own page tables.
    pub root: u64,
    /// Slots that were filled.
    pub filled: usize,
    /// Slots that were left as they are.
    pub unfilled: usize,
    /// Constants that were changed.
    pub constants: usize,
    /// Places that were relocated.
    pub relocated: usize,
}

/// A slot that was filled.
#[derive(Clone, Debug)]
pub struct Filled {
    /// The relocated code of the slot.
    pub bytes: Vec<u8>,
    /// The present address of its thunk.
    pub code: u64,
}

fn outside() -> Error {
    Error::new("the guest has too little memory for its kernel").hint("give the guest more with --memory")
}

/// Returns the present address of a linked one.
///
/// # Errors
/// If the kernel has no such symbol.
pub fn address_of(kernel: &Kernel, symbol: &str) -> Result<u64> {
    Ok(kernel.symbol(symbol)?.wrapping_add(DISTANCE))
}

fn physical_of(kernel: &Kernel, symbol: &str) -> Result<u64> {
    let missing = || {
        Error::new(format!("the kernel's {symbol} is not loaded"))
            .hint("use a vmlinux as `afterburner make` has built it, which is not stripped")
    };
    kernel.physical(kernel.symbol(symbol)?).ok_or_else(missing)
}

/// Loads it.
///
/// # Errors
/// If there is too little memory, or the kernel is not what its records and relocations say.
pub fn load(kernel: &Kernel, memory: &Memory, isolation: Isolation) -> Result<Loaded> {
    for segment in &kernel.segments {
        let place = memory.contains(segment.physical, segment.size).then_some(());
        place.and_then(|()| memory.write(segment.physical, &segment.bytes)).ok_or_else(outside)?;
    }
    relocate(kernel, memory)?;
    let constants = change_constants(kernel, memory)?;
    give_layout(kernel, memory)?;
    let root = prepare_tables(kernel, memory)?;
    let fixed = (isolation == Isolation::Process).then(|| Fixed::find(kernel, memory)).transpose()?;
    let mut loaded = fill_slots(kernel, memory)?;
    let hooked = hook_uses(kernel, memory, &mut loaded, isolation)?;
    avoid_the_hole(kernel, memory, &mut loaded)?;
    if let Some(fixed) = fixed {
        guard_accesses(kernel, memory, &mut loaded, &hooked, &fixed)?;
    }
    if loaded.thunks.len() as u64 > THUNKS_SIZE {
        return Err(Error::new("the kernel has too many slots").hint(
            "switch parts of the kernel off in its configuration, or make them modules, and build it again",
        ));
    }
    (loaded.root, loaded.constants, loaded.relocated) = (root, constants, kernel.relocations.len());
    Ok(loaded)
}

fn relocate(kernel: &Kernel, memory: &Memory) -> Result<()> {
    for relocation in &kernel.relocations {
        let at = relocation.physical;
        if relocation.change == Change::Long {
            let value = memory.read_long(at).ok_or_else(outside)?;
            memory.write_long(at, value.wrapping_add(DISTANCE)).ok_or_else(outside)?;
            continue;
        }
        let mut bytes = [0; 4];
        memory.read(at, &mut bytes).ok_or_else(outside)?;
        let value = u32::from_le_bytes(bytes);
        let moved = match relocation.change {
            Change::Backwards => value.wrapping_sub(DISTANCE as u32),
            _ => value.wrapping_add(DISTANCE as u32),
        };
        memory.write(at, &moved.to_le_bytes()).ok_or_else(outside)?;
    }
    Ok(())
}

fn change_constants(kernel: &Kernel, memory: &Memory) -> Result<usize> {
    let moved: HashSet<u64> = kernel.relocations.iter().map(|relocation| relocation.physical).collect();
    let special: Vec<_> = SPECIAL
        .iter()
        .flat_map(|&(function, names)| kernel.functions(names).map(move |range| (function, range)))
        .collect();
    let function_at = |at| {
        let found = special.iter().find(|(_, range)| range.contains(&at));
        found.map_or(Function::Other, |(function, _)| *function)
    };
    let mut changed = 0;
    for code in &kernel.code {
        let mut bytes = vec![0; code.size as usize];
        memory.read(code.physical, &mut bytes).ok_or_else(outside)?;
        let patches = constants::find(
            &bytes,
            code.address,
            |at| moved.contains(&(at - code.address + code.physical)),
            function_at,
        );
        changed += patches.len();
        for patch in patches {
            let at = patch.address - code.address + code.physical;
            memory.write(at, &patch.new.to_le_bytes()[..usize::from(patch.length)]).ok_or_else(outside)?;
        }
    }
    Ok(changed)
}

/// Writes the layout into the kernel's variables.
fn give_layout(kernel: &Kernel, memory: &Memory) -> Result<()> {
    let set = |symbol: &str, value: u64| -> Result<()> {
        memory.write_long(physical_of(kernel, symbol)?, value).ok_or_else(outside)
    };
    set("page_offset_base", DIRECT_MAP)?;
    set("vmalloc_base", VMALLOC)?;
    set("vmemmap_base", VMEMMAP)?;
    // The physical address of something in the image is its address less LINKED, plus this.
    set("phys_base", LINKED.wrapping_sub(DIRECT_MAP))?;
    allow_own_addresses(kernel, memory)?;
    refuse_low_addresses(kernel, memory)?;
    refuse_modules(kernel, memory)?;
    separate_programs(kernel, memory)
}

/// Makes a function of the kernel return true for all addresses. The kernel asks it, before a read
/// that may fault, if the address is in the upper half. Here the kernel reads, and takes the fault,
/// for which it is prepared.
fn allow_own_addresses(kernel: &Kernel, memory: &Memory) -> Result<()> {
    // mov $1,%eax ; ret
    const YES: &[u8] = &[0xB8, 1, 0, 0, 0, 0xC3];
    memory.write(physical_of(kernel, "copy_from_kernel_nofault_allowed")?, YES).ok_or_else(outside)
}

/// Makes the kernel refuse programs' addresses below 64 KiB, for every user: hosts let a process
/// map nothing there.
fn refuse_low_addresses(kernel: &Kernel, memory: &Memory) -> Result<()> {
    // The code is: cmp $USER_START,%rdi ; sbb %eax,%eax, which is -EPERM or 0 ; ret. It ends before
    // the function's own first return, which the kernel searches for.
    const REFUSE: &[u8] = &[0x48, 0x81, 0xFF, 0, 0, 1, 0, 0x19, 0xC0, 0xC3];
    const { assert!(USER_START == 0x1_0000 && libc::EPERM == 1) };
    memory.write(physical_of(kernel, "cap_mmap_addr")?, REFUSE).ok_or_else(outside)?;
    memory.write_long(physical_of(kernel, "dac_mmap_min_addr")?, USER_START).ok_or_else(outside)
}

/// Makes the kernel find no memory for modules: their slots would stay unfilled, and there is no
/// place for them near the image.
fn refuse_modules(kernel: &Kernel, memory: &Memory) -> Result<()> {
    // xor %eax,%eax ; ret
    const NOTHING: &[u8] = &[0x31, 0xC0, 0xC3];
    match physical_of(kernel, "module_alloc") {
        Ok(at) => memory.write(at, NOTHING).ok_or_else(outside),
        Err(_) => Ok(()),
    }
}

/// Separates programs' page tables from the kernel's. A new address space shares the kernel's part
/// of the top-level table, which begins at the direct map's entry. Here all of the table would be
/// shared. So the function that makes an address space gets another beginning of the kernel's part,
/// in a variable of its own. Programs' tables are never used for the kernel's addresses below.
fn separate_programs(kernel: &Kernel, memory: &Memory) -> Result<()> {
    memory.write_long(SPARE, KERNEL_TABLES).ok_or_else(outside)?;
    let (start, size) = kernel.find("pgd_alloc")?;
    let physical = physical_of(kernel, "pgd_alloc")?;
    let mut bytes = vec![0; size as usize];
    memory.read(physical, &mut bytes).ok_or_else(outside)?;
    let found = boundary_loads(&bytes, start, kernel.symbol("page_offset_base")?);
    for at in &found {
        let here = start.wrapping_add(DISTANCE) + at + 4;
        let to = (DIRECT_MAP + SPARE).wrapping_sub(here) as u32;
        memory.write(physical + at, &to.to_le_bytes()).ok_or_else(outside)?;
    }
    if found.is_empty() {
        return Err(Error::new(
            "the kernel's pgd_alloc does not say where the kernel's address space begins",
        )
        .hint("use a kernel from 6.1 on, built with RANDOMIZE_MEMORY=y"));
    }
    Ok(())
}

/// Returns the addresses of the operands by which instructions load the variable for the index of
/// an entry of a top-level table: it is shifted by 39 soon afterwards. Other uses are for physical
/// addresses.
fn boundary_loads(code: &[u8], address: u64, variable: u64) -> Vec<u64> {
    const SOON: usize = 6;
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let instructions: Vec<Instruction> = decoder.iter().collect();
    let loads = instructions.iter().enumerate().filter(|(at, load)| {
        load.mnemonic() == Mnemonic::Mov
            && load.is_ip_rel_memory_operand()
            && load.ip_rel_memory_address() == variable
            && instructions[at + 1..].iter().take(SOON).any(|shift| {
                shift.mnemonic() == Mnemonic::Shr
                    && shift.op0_register() == load.op0_register()
                    && shift.try_immediate(1).is_ok_and(|by| by == 39)
            })
    });
    // The displacement is a load's last field.
    loads.map(|(_, load)| load.next_ip() - 4 - address).collect()
}

/// A page that the guest is told is not its own.
pub const SPARE: u64 = 0x9_F000;
/// The place of another table.
const SPARE_TABLE: u64 = SPARE + PAGE;

/// Prepares the static page tables. Their entries hold physical addresses, which relocation has
/// changed. The kernel's fixed addresses have come into another gigabyte.
fn prepare_tables(kernel: &Kernel, memory: &Memory) -> Result<u64> {
    const TABLE: u64 = bits::PRESENT | bits::WRITE | bits::ACCESSED | bits::DIRTY;
    for table in ["level3_kernel_pgt", "level2_fixmap_pgt"] {
        let physical = physical_of(kernel, table)?;
        for at in (0..512).map(|index| physical + index * 8) {
            let entry = memory.read_long(at).ok_or_else(outside)?;
            if entry & bits::PRESENT != 0 {
                memory.write_long(at, entry.wrapping_sub(DISTANCE)).ok_or_else(outside)?;
            }
        }
    }
    let root = physical_of(kernel, "init_top_pgt")?;
    let upper = physical_of(kernel, "level3_kernel_pgt")?;
    let fixed = physical_of(kernel, "level2_fixmap_pgt")?;
    let index = crate::layout::FIXMAP >> 30;
    for linked in [LINKED >> 30 & 511, (LINKED >> 30 & 511) + 1] {
        memory.write_long(upper + linked * 8, 0).ok_or_else(outside)?;
    }
    // Some code has indices of linked fixed addresses as numbers. It finds the same table by them.
    const LAST: u64 = 511 * 8;
    memory.write_long(root + LAST, SPARE_TABLE | TABLE).ok_or_else(outside)?;
    memory.write_long(SPARE_TABLE + LAST, fixed | TABLE).ok_or_else(outside)?;
    memory.write_long(root, upper | TABLE).ok_or_else(outside)?;
    memory.write_long(upper + index * 8, fixed | TABLE).ok_or_else(outside)?;
    Ok(root)
}

/// Makes the error for a kernel whose search for free addresses is unknown.
fn gives_addresses_otherwise(name: &str) -> Error {
    Error::new(format!(
        "the kernel gives programs addresses in a way that is not known: it has no {name}, or another"
    ))
    .hint("kernels of 6.1 are known")
}

/// Makes the kernel's search for free addresses leave out those that programs cannot have: the
/// monitor's code, and the kernel's memory.
fn avoid_the_hole(kernel: &Kernel, memory: &Memory, loaded: &mut Loaded) -> Result<()> {
    const NAME: &str = "vm_unmapped_area";
    const LONGEST: usize = 32;
    let (physical, address) = (physical_of(kernel, NAME)?, address_of(kernel, NAME)?);
    let mut code = [0; LONGEST];
    memory.read(physical, &mut code).ok_or_else(outside)?;
    let at = THUNKS + loaded.thunks.len() as u64;
    let (thunk, length) = thunks::search_beside(&layout::hole(memory), &code, address, at)?
        .ok_or_else(|| gives_addresses_otherwise(NAME))?;
    put_thunk(loaded, memory, thunk, physical, address, length)
}

/// Makes functions that give a program addresses leave the guest if the program cannot have them.
/// If programs are in processes of their own, functions that use a program's memory leave it, too.
/// Returns the names of these functions.
fn hook_uses(
    kernel: &Kernel,
    memory: &Memory,
    loaded: &mut Loaded,
    isolation: Isolation,
) -> Result<HashSet<&'static str>> {
    const LONGEST: usize = 32;
    let hole = layout::hole(memory);
    let mut hooked = HashSet::new();
    for (name, what) in USES {
        if isolation == Isolation::None && !matches!(what, Use::Give(_)) {
            continue;
        }
        let Ok(physical) = physical_of(kernel, name) else { continue };
        let address = address_of(kernel, name)?;
        let mut code = [0; LONGEST];
        memory.read(physical, &mut code).ok_or_else(outside)?;
        let at = THUNKS + loaded.thunks.len() as u64;
        let Some((thunk, length)) = thunks::hook(what, &code, address, at, loaded.exits.len(), &hole)? else {
            continue;
        };
        put_thunk(loaded, memory, thunk, physical, address, length)?;
        hooked.insert(name);
    }
    let gives = |(name, what): &&(&str, Use)| matches!(what, Use::Give(_)) && !hooked.contains(name);
    match USES.iter().find(gives) {
        Some((name, _)) => Err(gives_addresses_otherwise(name)),
        None => Ok(hooked),
    }
}

/// Replaces instructions that use a program's memory by jumps that leave the guest. A jump needs
/// movable instructions after it; otherwise a trap takes its place. The code for slots holds the
/// original instructions.
fn guard_accesses(
    kernel: &Kernel,
    memory: &Memory,
    loaded: &mut Loaded,
    hooked: &HashSet<&str>,
    fixed: &Fixed,
) -> Result<()> {
    for instruction in user_access::find(kernel, memory, hooked)? {
        let (address, length) = (instruction.ip(), instruction.len());
        if slot_at(loaded, address..address + length as u64) {
            return Err(user_access::not_understood(format!(
                "a slot has borrowed the instruction at {address:#x}"
            )));
        }
        match displaced(memory, loaded, fixed, &instruction)? {
            Some(displaced) => guard_by_jump(memory, loaded, &displaced)?,
            None => guard_by_trap(memory, loaded, &instruction)?,
        }
    }
    Ok(())
}

fn slot_at(loaded: &Loaded, place: std::ops::Range<u64>) -> bool {
    let before = loaded.slots.range(..place.end).next_back();
    before.is_some_and(|(at, slot)| at + slot.bytes.len() as u64 > place.start)
}

/// Returns an instruction and those after it that a jump in its place displaces, if they can be
/// moved.
fn displaced(
    memory: &Memory,
    loaded: &Loaded,
    fixed: &Fixed,
    first: &Instruction,
) -> Result<Option<Vec<Instruction>>> {
    const LONGEST: usize = 32;
    let mut bytes = [0; LONGEST];
    memory.read(first.ip() - DIRECT_MAP, &mut bytes).ok_or_else(outside)?;
    let mut displaced = Vec::new();
    let mut length = 0;
    for instruction in Decoder::with_ip(64, &bytes, first.ip(), DecoderOptions::NONE).iter() {
        let is_first = displaced.is_empty();
        let is_free = !slot_at(loaded, instruction.ip()..instruction.next_ip());
        if !is_free || !is_first && !fixed.may_move(&instruction) {
            return Ok(None);
        }
        length += instruction.len();
        displaced.push(instruction);
        if length >= HOOK_LENGTH {
            return Ok(Some(displaced));
        }
    }
    Ok(None)
}

fn guard_by_jump(memory: &Memory, loaded: &mut Loaded, displaced: &[Instruction]) -> Result<()> {
    let (Some(first), Some(last)) = (displaced.first(), displaced.last()) else { return Ok(()) };
    let place = THUNKS + loaded.thunks.len() as u64;
    let (thunk, places) = thunks::access(displaced, place, loaded.exits.len())?;
    let length = (last.next_ip() - first.ip()) as usize;
    put_thunk(loaded, memory, thunk, first.ip() - DIRECT_MAP, first.ip(), length)?;
    for (at, (&instruction, &code)) in displaced.iter().zip(&places).enumerate() {
        let access = UserAccess { instruction, code };
        if at == 0 { loaded.accesses.push(access) } else { loaded.displaced.push(access) }
    }
    Ok(())
}

fn guard_by_trap(memory: &Memory, loaded: &mut Loaded, instruction: &Instruction) -> Result<()> {
    const TRAP: u8 = 0xCC;
    let physical = instruction.ip() - DIRECT_MAP;
    let mut bytes = vec![0; instruction.len()];
    memory.read(physical, &mut bytes).ok_or_else(outside)?;
    let code = THUNKS + loaded.thunks.len() as u64;
    loaded.thunks.extend(thunks::stand_in(instruction, code)?);
    loaded.thunks.resize(loaded.thunks.len().next_multiple_of(ALIGNMENT), 0xCC);
    memory.write(physical, &[TRAP]).ok_or_else(outside)?;
    loaded.accesses.push(UserAccess { instruction: *instruction, code });
    loaded.slots.insert(instruction.ip(), Filled { bytes, code });
    Ok(())
}

fn fill_slots(kernel: &Kernel, memory: &Memory) -> Result<Loaded> {
    let mut loaded = Loaded::default();
    for (&linked, records) in &kernel.slots {
        let Some(physical) = kernel.physical(linked).filter(|_| thunks::is_filled(records)) else {
            loaded.unfilled += 1;
            continue;
        };
        fill(&mut loaded, memory, linked, physical, records)?;
        loaded.filled += 1;
    }
    Ok(loaded)
}

fn fill(loaded: &mut Loaded, memory: &Memory, linked: u64, physical: u64, records: &[Record]) -> Result<()> {
    let length = usize::from(records.first().map_or(0, |record| record.length));
    let mut bytes = vec![0; length];
    memory.read(physical, &mut bytes).ok_or_else(outside)?;
    let address = linked.wrapping_add(DISTANCE);
    let at = THUNKS + loaded.thunks.len() as u64;
    let thunk = thunks::build(&Slot { address, bytes: &bytes, records }, at, loaded.exits.len())?;
    put_thunk(loaded, memory, thunk, physical, address, length)
}

/// Appends code to the thunks, and writes a jump to it over so many bytes.
fn put_thunk(
    loaded: &mut Loaded,
    memory: &Memory,
    thunk: Thunk,
    physical: u64,
    address: u64,
    length: usize,
) -> Result<()> {
    let at = THUNKS + loaded.thunks.len() as u64;
    let mut bytes = vec![0; length];
    memory.read(physical, &mut bytes).ok_or_else(outside)?;
    loaded.exits.extend(thunk.exits);
    loaded.thunks.extend(thunk.code);
    loaded.thunks.resize(loaded.thunks.len().next_multiple_of(ALIGNMENT), 0xCC);
    let jump = at.wrapping_sub(address + 5) as u32;
    // What is left of it is never reached: a trap shows it if it is.
    let mut slot = vec![0xCC; length];
    slot[0] = 0xE9;
    slot[1..5].copy_from_slice(&jump.to_le_bytes());
    memory.write(physical, &slot).ok_or_else(outside)?;
    loaded.slots.insert(address, Filled { bytes, code: at });
    Ok(())
}
