//! QEMU without one of its races: a copy of the program in which one function does nothing.
//!
//! Loading x87 state without a pending exception lowers IGNNE#. QEMU keeps this line as a flag of
//! the *first* processor, in the word that holds its GIF. Every processor's thread writes that word
//! without a lock (`cpu_clear_ignne`, from 5.2 to 11.1 at least).
//!
//! If CLGI, STGI, VMRUN or a #VMEXIT of the first processor falls between the load and the store,
//! GIF is lost: that processor takes no interrupt any more. The line matters to programs for DOS
//! only, and nothing in the lab ever raises it.
//!
//! The lab finds the function by its name, which QEMU exports for its modules, and makes the
//! function return at once. A program without such a name is used as it is.

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

const FUNCTION: &str = "cpu_clear_ignne";
/// The opcode of RET.
const RETURN: u8 = 0xC3;

/// Returns the repaired copy of a program in the search path. The copy is made first if it is
/// missing. It finds its data where the original does: relative to itself.
///
/// # Errors
/// If there is no such program, or the copy cannot be made.
pub fn ensure(name: &str) -> Result<PathBuf> {
    let original = host::find_program(name)
        .ok_or_else(|| Error::Host(format!("{name} is not installed: run scripts/bootstrap")))?;
    let recipe = Ingredients::default().with(FUNCTION).with_path(&original)?.name();
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
    match offset_of(&bytes, FUNCTION).map_err(|error| Error::Host(format!("{}: {error}", what())))? {
        Some(offset) => bytes[offset] = RETURN,
        None => return Ok(()),
    }
    fs::write(program, bytes).context(what)?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).context(what)
}

/// Returns the offset in an ELF file at which an exported function begins.
fn offset_of(elf: &[u8], function: &str) -> object::Result<Option<usize>> {
    let file = object::File::parse(elf)?;
    let address =
        file.dynamic_symbols().find(|symbol| symbol.name() == Ok(function) && symbol.is_definition());
    let Some(address) = address.map(|symbol| symbol.address()) else { return Ok(None) };
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
}
