//! The hypervisor's image in a machine's memory.

use std::{fs, path::Path};

use object::{Object, ObjectSymbol};

use super::dump::{PAGE, bytes_at};

/// The variants of the image.
const IMAGES: [&str; 2] = ["hypervisor", "hypervisor-faults"];

/// Returns the name of the hypervisor's code at this physical address, if an image of this folder lies there.
pub fn name_of(memory: &[u8], phys: u64, folder: &Path) -> Option<String> {
    IMAGES.iter().find_map(|name| {
        let image = fs::read(folder.join(name).with_extension("bin")).ok()?;
        // Code is not relocated, and so its pages are the same in memory.
        let offset = (0..image.len() as u64)
            .step_by(PAGE as usize)
            .map(|page| page + phys % PAGE)
            .find(|offset| is_at(memory, &image, phys.checked_sub(*offset)))?;
        let elf = fs::read(folder.join(name).with_extension("elf")).ok()?;
        let file = object::File::parse(&*elf).ok()?;
        let before = file.symbols().filter(|symbol| symbol.is_definition() && symbol.address() <= offset);
        let symbol = before.max_by_key(ObjectSymbol::address)?;
        Some(format!("{}+{:#x} in the hypervisor", symbol.name().ok()?, offset - symbol.address()))
    })
}

/// Returns true if the image's first page lies at this physical address.
fn is_at(memory: &[u8], image: &[u8], phys: Option<u64>) -> bool {
    let first = image.get(..PAGE as usize);
    first.is_some() && phys.and_then(|phys| bytes_at(memory, phys, PAGE as usize)) == first
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Takes this program for the hypervisor.
    #[test]
    fn code_is_found_wherever_the_image_lies() {
        let folder = std::env::temp_dir().join(format!("mercury-autopsy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let elf = fs::read(std::env::current_exe().unwrap()).unwrap();
        let main = object::File::parse(&*elf).unwrap().symbol_by_name("main").unwrap().address();
        let mut image = vec![0; usize::try_from(main.next_multiple_of(PAGE) + PAGE).unwrap()];
        image[..7].copy_from_slice(b"MERCURY");
        fs::write(folder.join("hypervisor-faults.bin"), &image).unwrap();
        fs::write(folder.join("hypervisor-faults.elf"), &elf).unwrap();
        let memory = [vec![1; 3 << 12], image, vec![1; 1 << 12]].concat();
        let name = name_of(&memory, (3 << 12) + main + 1, &folder);
        assert_eq!(name.as_deref(), Some("main+0x1 in the hypervisor"));
        assert_eq!(name_of(&memory, 1 << 12, &folder), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
