//! PCI's configuration space by its ports. Devices that are gone read as all ones. Bridges stay: the kernel
//! leaves them alone, and would wait for each of them when it resumes. Controllers of the machine's own disks
//! answer as before.

use super::local::Local;
use mercury_image::Device;

/// Bit of the address that enables access.
const ENABLED: u32 = 1 << 31;
/// Class of bridges.
const BRIDGE: &str = "06";
const SPACE: usize = 256;

/// The configuration space.
#[derive(Debug, Default)]
pub struct Pci {
    address: u32,
    /// Bridges by bus, device and function as in an address, each with its registers.
    bridges: Vec<(u32, Vec<u8>)>,
    locals: Vec<Local>,
}

impl Pci {
    /// Makes it with the bridges of a machine, and with controllers of its disks.
    pub fn new(devices: &[Device], locals: Vec<Local>) -> Self {
        let bridges = devices.iter().filter(|one| one.class.starts_with(BRIDGE) && !one.config.is_empty());
        let bridges = bridges.filter_map(|one| {
            let mut space = one.config.clone();
            space.resize(SPACE, 0);
            Some((place(&one.address)?, space))
        });
        Self { address: 0, bridges: bridges.collect(), locals }
    }

    pub fn locals(&self) -> &[Local] {
        &self.locals
    }

    pub fn address(&self) -> u32 {
        self.address
    }

    pub fn select(&mut self, address: u32) {
        self.address = address;
    }

    /// Returns the selected function, and the selected register.
    fn selected(&self, offset: u16) -> Option<(u32, usize)> {
        let register = (self.address & 0xFC) as usize + usize::from(offset & 3);
        (self.address & ENABLED != 0).then_some((self.address & 0x00FF_FF00, register))
    }

    /// Returns the registers of a bridge from one on.
    fn bridge(&mut self, place: u32, register: usize) -> Option<&mut [u8]> {
        self.bridges.iter_mut().find(|(other, _)| *other == place)?.1.get_mut(register..)
    }

    /// Reads a data port.
    pub fn read(&mut self, offset: u16, data: &mut [u8]) {
        data.fill(0xFF);
        let Some((place, register)) = self.selected(offset) else { return };
        if let Some(local) = self.locals.iter().find(|local| local.place == place) {
            return local.read_configuration(register, data);
        }
        if let Some(space) = self.bridge(place, register) {
            data.iter_mut().zip(space).for_each(|(to, from)| *to = *from);
        }
    }

    /// Writes a data port. A bridge keeps what is written, and does nothing.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        let Some((place, register)) = self.selected(offset) else { return };
        if let Some(local) = self.locals.iter().find(|local| local.place == place) {
            return local.write_configuration(register, data);
        }
        if let Some(space) = self.bridge(place, register) {
            space.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Returns the place of a function in an address, from a text like `0000:00:1f.2`. Only the first domain has
/// ports.
pub fn place(address: &str) -> Option<u32> {
    let rest = address.strip_prefix("0000:")?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let number = |text: &str, most: u32| u32::from_str_radix(text, 16).ok().filter(|number| *number <= most);
    Some(number(bus, 0xFF)? << 16 | number(device, 0x1F)? << 11 | number(function, 7)? << 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(address: &str, class: &str) -> Device {
        let config = vec![0x86, 0x80, 0x0C, 0x10];
        Device { address: address.into(), class: class.into(), config, ..Device::default() }
    }

    #[test]
    fn bridges_keep_their_registers_and_other_devices_are_gone() {
        let devices = [
            device("0000:00:1c.4", "060400"),
            device("0000:00:02.0", "010802"),
            device("0001:00:00.0", "060000"),
        ];
        let mut pci = Pci::new(&devices, Vec::new());
        let mut read = |address, offset, length| {
            pci.select(address);
            let mut data = [0; 4];
            pci.read(offset, &mut data[..length]);
            u32::from_le_bytes(data)
        };
        let bridge = ENABLED | 0x1C << 11 | 4 << 8;
        assert_eq!(read(bridge, 0, 4), 0x100C_8086);
        assert_eq!(read(bridge, 2, 2), 0x100C);
        assert_eq!(read(bridge | 0x3C, 0, 4), 0);
        assert_eq!(read(bridge & !ENABLED, 0, 4), u32::MAX);
        assert_eq!(read(ENABLED | 2 << 11, 0, 4), u32::MAX);
        assert_eq!(read(ENABLED, 0, 4), u32::MAX);
        pci.select(bridge | 0x18);
        pci.write(1, &[7, 9]);
        let mut data = [0; 4];
        pci.read(0, &mut data);
        assert_eq!(data, [0, 7, 9, 0]);
        pci.select(bridge | 0xFC);
        pci.write(3, &[1, 2, 3, 4]);
        pci.read(3, &mut data);
        assert_eq!(data, [1, 0xFF, 0xFF, 0xFF]);
    }

    #[test]
    fn addresses_are_read_and_impossible_ones_are_none() {
        assert_eq!(place("0000:3f:1f.7"), Some(0x3F_FF00));
        for wrong in
            ["", "0000:00:20.0", "0000:00:00.8", "0000:100:00.0", "0001:00:00.0", "0000:00", "0000:0:0"]
        {
            assert_eq!(place(wrong), None, "{wrong}");
        }
    }
}
