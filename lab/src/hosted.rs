//! `lab hosted`: a hosted Debian on this terminal.

use std::{
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use mercury_initramfs::Archive;

use crate::{
    artefacts,
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    image::{Image, Release},
    lock::Lock,
    paths,
    previrtualization::{self, Flavour},
};

const RELEASE: Release = Release::Bookworm;
const MEMORY: &str = "512M";
const APPEND: &str = "quiet loglevel=1 root=/dev/vda rw init=/usr/sbin/hosted-init";

/// Files on the disk: the place, the contents and the rights.
const FILES: &[(&str, &str, &str)] = &[
    ("/usr/sbin/hosted-init", include_str!("../guest/hosted/init"), "0100755"),
    ("/etc/hosted.bashrc", include_str!("../guest/hosted/bashrc"), "0100644"),
];

/// What each archive of [`root_archive`] has from Debian's image: the place, and the file there.
const SHELL: [(&str, &str); 3] = [
    ("bin/sh", "usr/bin/dash"),
    ("lib/x86_64-linux-gnu/libc.so.6", "usr/lib/x86_64-linux-gnu/libc.so.6"),
    ("lib64/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
];

/// Makes an archive (initramfs) with a shell, its libraries, a console and more: files by their places there,
/// and character devices by their places and numbers. `init` is the first program.
///
/// # Errors
/// If a file cannot be read.
pub fn root_archive(
    tree: &Path,
    files: &[(&str, &Path)],
    devices: &[(&str, (u32, u32))],
    init: &str,
) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "lib", "lib/x86_64-linux-gnu", "lib64"] {
        archive.directory(directory);
    }
    for (place, numbers) in [("dev/console", (5, 1))].iter().chain(devices) {
        archive.char_device(place, *numbers);
    }
    let shell = SHELL.map(|(place, from)| (place, tree.join(from)));
    let files = files.iter().map(|(place, from)| (*place, from.to_path_buf()));
    for (place, from) in shell.into_iter().chain(files) {
        archive.file(place, &fs::read(&from).context(|| format!("read {}", from.display()))?);
    }
    archive.file("init", init.as_bytes());
    Ok(archive.finish())
}

/// Starts a hosted Debian with a shell, on the small pre-virtualized kernel and a disk that stays.
/// `arguments` go to `mercury hosted run`.
///
/// # Errors
/// If a program, the kernel or the disk cannot be built.
pub fn shell(arguments: &[OsString]) -> Result<ExitCode> {
    let image = Image::ensure(RELEASE)?;
    let built = previrtualization::build(RELEASE, Flavour::PreVirtualized)?;
    let mercury = artefacts::build_hosted()?;
    let disk = disk(&image)?;
    let mut append = format!("{APPEND} {}", terminal());
    let mut command = Command::new(mercury);
    command.args(["hosted", "run"]);
    if !has(arguments, "--net") {
        match network() {
            Ok(network) => {
                append = format!("{append} {network}");
                command.args(["--net", "passt"]);
            }
            Err(why) => println!("Without a network: {why}."),
        }
    }
    if !has(arguments, "--memory") {
        command.args(["--memory", MEMORY]);
    }
    if !has(arguments, "--append") {
        command.arg("--append").arg(append);
    }
    println!("Debian's disk is {}.", disk.display());
    let status = command.arg("--kernel").arg(built.vmlinux).arg("--disk").arg(disk).args(arguments).status();
    let status = status.context(|| "start a hosted machine".into())?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns true if an option is among arguments, with its value in the same word or the next.
fn has(arguments: &[OsString], option: &str) -> bool {
    arguments.iter().any(|word| {
        let word = word.to_string_lossy();
        word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// Makes the disk if it is missing, and writes the present first program to it.
fn disk(image: &Image) -> Result<PathBuf> {
    let path = paths::lab_dir("hosted")?
        .join(image.disk().parent().and_then(|all| all.file_name()).unwrap_or_default());
    if !path.exists() {
        let new = path.with_extension("new");
        host::copy(&image.disk(), &new)?;
        fs::rename(&new, &path).context(|| format!("name {}", path.display()))?;
    }
    // Older images were open to all users of the host.
    let owner = fs::Permissions::from_mode(0o600);
    fs::set_permissions(&path, owner).context(|| format!("keep {} from others", path.display()))?;
    // A running machine holds the lock. `mercury hosted run` reports that when it starts.
    let Some(lock) = Lock::take(&path)? else { return Ok(path) };
    let stamp = path.with_extension("files");
    let inputs =
        FILES.iter().fold(Ingredients::default(), |all, (to, text, mode)| all.with(to).with(text).with(mode));
    let inputs = inputs.name();
    if !fs::read_to_string(&stamp).is_ok_and(|written| written == inputs) {
        put_files(&path)?;
        fs::write(&stamp, inputs).context(|| format!("write {}", stamp.display()))?;
    }
    drop(lock);
    Ok(path)
}

/// Writes the files into the file system of a disk that no machine uses.
fn put_files(disk: &Path) -> Result<()> {
    // A machine that was killed has left a journal, whose replay would undo what is written here.
    let mut check = Command::new("sh");
    check.args(["-c", "e2fsck -fp \"$1\"; [ $? -le 1 ]", "sh"]).arg(disk);
    host::run("checking the hosted machine's file system", "hosted-check", &mut check)?;
    FILES.iter().try_for_each(|(to, text, mode)| put_file(disk, to, text, mode))
}

/// Writes a file into the file system of a disk that no machine uses.
///
/// # Errors
/// If the file is not there afterwards.
pub fn put_file(disk: &Path, to: &str, text: &str, mode: &str) -> Result<()> {
    let from = paths::lab_dir("hosted")?.join("file");
    fs::write(&from, text).context(|| format!("write {}", from.display()))?;
    let script = from.with_extension("orders");
    let orders = format!(
        "rm {to}\nwrite {} {to}\nsif {to} mode {mode}\nsif {to} uid 0\nsif {to} gid 0\n",
        from.display()
    );
    fs::write(&script, orders).context(|| format!("write {}", script.display()))?;
    let mut write = Command::new("debugfs");
    write.arg("-w").arg("-f").arg(&script).arg(disk);
    host::run("writing to the hosted machine's disk", "hosted-write", &mut write)?;
    for done in [&from, &script] {
        fs::remove_file(done).context(|| format!("remove {}", done.display()))?;
    }
    // debugfs exits with success even if its orders failed.
    let mut read = Command::new("debugfs");
    let read = read.args(["-R", &format!("cat {to}")]).arg(disk).output();
    let read = read.context(|| "start debugfs".into())?;
    if read.stdout == text.as_bytes() {
        return Ok(());
    }
    Err(Error::Host(format!(
        "cannot write {to} to the disk {}: debugfs left something else there. Remove the disk, \
         and it is made again; it may be full or damaged",
        disk.display()
    )))
}

/// Describes this terminal for the machine's first program, in words of the kernel's command line, which
/// become its environment.
fn terminal() -> String {
    let term = std::env::var("TERM").ok().filter(|term| is_plain(term)).unwrap_or_else(|| "linux".into());
    let size = rustix::termios::tcgetwinsize(std::io::stdin())
        .ok()
        .filter(|size| size.ws_row > 0 && size.ws_col > 0);
    let size = size.map(|size| format!(" ROWS={} COLUMNS={}", size.ws_row, size.ws_col));
    format!("TERM={term}{}", size.unwrap_or_default())
}

/// Returns true for a word that the kernel's command line takes as it is.
fn is_plain(word: &str) -> bool {
    !word.is_empty()
        && word.len() < 64
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-+.:/,".contains(&byte))
}

/// Describes the network for the machine's first program, in the same way. passt gives the machine
/// the host's own address and gateway, and so does this description.
///
/// # Errors
/// The reason for which there can be no network.
fn network() -> std::result::Result<String, String> {
    if host::find_program("passt").is_none() {
        return Err("passt is not installed (Debian's package is called passt)".into());
    }
    let said = |arguments: &[&str]| {
        let output = Command::new("ip").args(arguments).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    };
    let route = said(&["-4", "route", "show", "default"]);
    let missing = || "this host has no default route with an IPv4 address, which passt needs".to_owned();
    let (device, gateway) = (word_after(&route, "dev"), word_after(&route, "via"));
    let address = said(&["-4", "-o", "address", "show", "dev", device.ok_or_else(missing)?]);
    let address = word_after(&address, "inet").ok_or_else(missing)?;
    let servers = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"]
        .map(|path| nameservers(&fs::read_to_string(path).unwrap_or_default()));
    let servers = servers.into_iter().find(|servers| !servers.is_empty()).unwrap_or_default();
    let words = [address.to_owned(), gateway.ok_or_else(missing)?.to_owned(), servers.join(",")];
    let [address, gateway, servers] = words;
    Ok(format!("ADDRESS={address} GATEWAY={gateway} NAMESERVERS={servers}"))
}

fn word_after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.split_whitespace().skip_while(|one| *one != word).nth(1)
}

/// Returns the name servers of a resolv.conf that can be reached from elsewhere: not those on the host's own
/// loopback interface.
fn nameservers(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    let servers = lines.filter_map(|rest| rest.trim().parse::<std::net::Ipv4Addr>().ok());
    servers.filter(|server| !server.is_loopback()).map(|server| server.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_of_the_host_s_loopback_interface_are_left_out() {
        let text = "# a comment\nsearch example.org\nnameserver 127.0.0.53\nnameserver 192.0.2.7\nnameserver \
                    ::1\n\
                    nameserver 198.51.100.1\n";
        assert_eq!(nameservers(text), ["192.0.2.7", "198.51.100.1"]);
    }

    #[test]
    fn an_option_is_found_with_its_value_in_either_word() {
        let words = ["--cpus", "2", "--net=passt,host"].map(OsString::from);
        assert!(has(&words, "--net") && has(&words, "--cpus") && !has(&words, "--memory"));
        assert!(!has(&["--network".into()], "--net"));
    }

    #[test]
    fn terminal_names_have_no_special_characters() {
        assert!(is_plain("screen.xterm-256color") && !is_plain("a b") && !is_plain("x\"") && !is_plain(""));
    }
}
