//! The writer of an initramfs: a cpio archive in the "newc" format (`initramfs-buffer-format` in the kernel's
//! documentation). Each entry is a header of thirteen eight-digit hexadecimal fields after the magic
//! `070701`, the name with a NUL, and the data; name and data are padded to four bytes.

/// An archive that is being written.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHAR_DEVICE: u32 = 0o020_000;

impl Archive {
    /// Adds a directory. Its parents must have been added before.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, name: &str, data: &[u8]) {
        self.entry(name, FILE | 0o755, (0, 0), data);
    }

    /// Adds a character device by its major and minor number.
    pub fn char_device(&mut self, name: &str, device: (u32, u32)) {
        self.entry(name, CHAR_DEVICE | 0o600, device, &[]);
    }

    /// Ends the archive and returns its bytes.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let (uid, gid, links, mtime, check) = (0, 0, 1, 0, 0);
        let fields =
            [self.entries, mode, uid, gid, links, mtime, size, 0, 0, device.0, device.1, name_size, check];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_their_place() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.file("init", b"hello");
        let bytes = archive.finish();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[110..114], b"dev\0");
        let file = &bytes[116..];
        assert_eq!(&file[..6], b"070701");
        assert_eq!(&file[54..62], b"00000005");
        assert_eq!(&file[110..115], b"init\0");
        assert_eq!(&file[116..121], b"hello");
        assert_eq!(bytes.len() % 4, 0);
    }
}
