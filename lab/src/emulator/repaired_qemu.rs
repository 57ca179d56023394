//! QEMU without two of its faults: a copy of the program with some instructions changed. The first is in all
//! versions from 5.2 to 11.1 at least. The second was found in 11.1, and 7.2 has the same code. The lab finds
//! the places by names that QEMU exports for its modules. A program without such a name is used as it is.
//!
//! **A lost GIF.** Loading x87 state without a pending exception lowers IGNNE#. QEMU keeps this line as a
//! flag of the *first* processor, in the word that holds its GIF. Every processor's thread writes that word
//! without a lock (`cpu_clear_ignne`). If CLGI, STGI, VMRUN or a #VMEXIT of the first processor falls between
//! the load and the store, GIF is lost: that processor takes no interrupt any more. The line matters to
//! programs for DOS only, and nothing in the lab ever raises it. The function returns at once.
//!
//! **An interrupt that comes twice.** VMRUN delivers the interrupt of EVENTINJ at once (`helper_vmrun`), but
//! also notes its vector as the exception that the processor has. Nothing takes the note back until the next
//! interrupt or exit. If the processor's thread is asked to stop before that, or has executed all of its
//! instructions where they are counted (`-icount`), QEMU delivers the vector once more, as an exception,
//! with interrupts off as well. A guest's kernel then waits for ever for a lock that it holds. The note is
//! not made.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use object::{Object, ObjectSegment, ObjectSymbol};

use crate::{
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths,
};

/// The name of all changes together. A change of them needs another one.
pub const RECIPE: &str = "no IGNNE#, no second interrupt";

/// Lowers IGNNE#.
const CLEAR_IGNNE: &str = "cpu_clear_ignne";
/// The opcode of RET.
const RETURN: u8 = 0xC3;
/// Delivers an interrupt.
const DELIVER: &str = "do_interrupt_x86_hardirq";
/// The largest distance of the note from the call that delivers the interrupt, in bytes.
const NOTE_BEFORE_CALL: usize = 64;
/// MOV of ESI, the vector, into a field at RBX with an offset of 32 bits: the note.
const NOTE: [u8; 2] = [0x89, 0xB3];
/// A NOP as long as it.
const NO_NOTE: [u8; 6] = [0x66, 0x0F, 0x1F, 0x44, 0x00, 0x00];
/// MOV of a constant of 32 bits into such a field. It follows the note: this is no software interrupt.
const NO_SOFTWARE: [u8; 2] = [0xC7, 0x83];
/// The opcode of a call by a distance.
const CALL: u8 = 0xE8;

/// Returns the repaired copy of a program in the search path. The copy is made first if it is
/// missing. It finds its data where the original does: relative to itself.
///
/// # Errors
/// If there is no such program, or the copy cannot be made.
pub fn ensure(name: &str) -> Result<PathBuf> {
    let original = host::find_program(name)
        .ok_or_else(|| Error::Host(format!("{name} is not installed: run scripts/bootstrap")))?;
    let recipe = Ingredients::default().with(RECIPE).with_path(&original)?.name();
    let dir = paths::lab_dir("tools")?.join(format!("qemu-repaired-{recipe}"));
    if !dir.exists() {
        let _lock = Lock::wait("qemu-repaired")?;
        if !dir.exists() {
            make(&original, &dir, name)?;
        }
    }
    Ok(dir.join("bin").join(name))
}

fn make(original: &Path, dir: &Path, name: &str) -> Result<()> {
    let new = dir.with_extension("new");
    host::remove_tree(&new)?;
    let prefix = original.ancestors().nth(2).unwrap_or(Path::new("/usr"));
    let what = || format!("copy {}", original.display());
    fs::create_dir_all(new.join("bin")).context(what)?;
    for data in ["share", "lib"] {
        symlink(prefix.join(data), new.join(data)).context(what)?;
    }
    let copy = new.join("bin").join(name);
    fs::copy(original, &copy).context(what)?;
    repair(&copy)?;
    fs::rename(&new, dir).context(what)
}

/// Repairs a program in place.
///
/// # Errors
/// If the file is no program, or cannot be written.
pub fn repair(program: &Path) -> Result<()> {
    let what = || format!("repair {}", program.display());
    let mut bytes = fs::read(program).context(what)?;
    let wrong = |error: object::Error| Error::Host(format!("{}: {error}", what()));
    if let Some(offset) = offset_of(&bytes, CLEAR_IGNNE).map_err(wrong)? {
        bytes[offset] = RETURN;
    }
    for offset in notes(&bytes).map_err(wrong)? {
        bytes[offset..offset + NO_NOTE.len()].copy_from_slice(&NO_NOTE);
    }
    fs::write(program, bytes).context(what)?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).context(what)
}

/// Returns the offsets in an ELF file of all instructions that note a delivered interrupt's vector.
fn notes(elf: &[u8]) -> object::Result<Vec<usize>> {
    let file = object::File::parse(elf)?;
    let Some(deliver) = address_of(&file, DELIVER) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for segment in file.segments() {
        let (start, size) = segment.file_range();
        let Some(bytes) = elf.get(start as usize..(start + size) as usize) else { continue };
        let calls = bytes.windows(5).enumerate().filter(|(at, code)| {
            let distance = i32::from_le_bytes([code[1], code[2], code[3], code[4]]);
            let target = segment.address().wrapping_add(*at as u64 + 5).wrapping_add_signed(distance.into());
            code[0] == CALL && target == deliver
        });
        for (call, _) in calls {
            let from = call.saturating_sub(NOTE_BEFORE_CALL);
            let note = bytes[from..call]
                .windows(8)
                .position(|code| code.starts_with(&NOTE) && code[6..] == NO_SOFTWARE);
            found.extend(note.map(|note| start as usize + from + note));
        }
    }
    Ok(found)
}

/// Returns the address of an exported function.
fn address_of(file: &object::File<'_>, function: &str) -> Option<u64> {
    let mut symbols = file.dynamic_symbols();
    let symbol = symbols.find(|symbol| symbol.name() == Ok(function) && symbol.is_definition())?;
    Some(symbol.address())
}

/// Returns the offset in an ELF file at which an exported function begins.
fn offset_of(elf: &[u8], function: &str) -> object::Result<Option<usize>> {
    let file = object::File::parse(elf)?;
    let Some(address) = address_of(&file, function) else { return Ok(None) };
    let offset = file.segments().find_map(|segment| {
        let inside = address.checked_sub(segment.address())?;
        let (start, size) = segment.file_range();
        (inside < size).then_some((start + inside) as usize)
    });
    Ok(offset)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn exported_functions_are_found_and_others_are_not() {
        let libc = fs::read("/lib/x86_64-linux-gnu/libc.so.6").unwrap();
        let offset = offset_of(&libc, "getppid").unwrap().unwrap();
        // The instruction `mov eax, 110`, near the beginning: 110 is the number of the system call.
        assert!(libc[offset..offset + 16].windows(5).any(|code| code == [0xB8, 110, 0, 0, 0]));
        assert_eq!(offset_of(&libc, "no_such_function").unwrap(), None);
    }

    /// Each QEMU that is here makes the note in one place, and does not make it in the copy.
    #[test]
    fn the_note_of_a_delivered_interrupt_is_found() {
        let programs = host::find_program("qemu-system-x86_64").into_iter();
        let newer = paths::lab_dir("tools").ok().and_then(|tools| fs::read_dir(tools).ok());
        let newer = newer.into_iter().flatten().flatten();
        let programs = programs.chain(newer.map(|dir| dir.path().join("tree/usr/bin/qemu-system-x86_64")));
        let mut tried = 0;
        for program in programs {
            let Ok(mut elf) = fs::read(&program) else { continue };
            let found = notes(&elf).unwrap();
            let [offset] = found[..] else { panic!("{}: {found:?}", program.display()) };
            elf[offset..offset + NO_NOTE.len()].copy_from_slice(&NO_NOTE);
            assert!(notes(&elf).unwrap().is_empty());
            tried += 1;
        }
        assert!(tried > 0, "scripts/bootstrap installs QEMU");
    }

    #[test]
    fn a_program_without_the_functions_has_no_notes() {
        let libc = fs::read("/lib/x86_64-linux-gnu/libc.so.6").unwrap();
        assert!(notes(&libc).unwrap().is_empty());
    }
}
