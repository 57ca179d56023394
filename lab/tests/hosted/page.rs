//! The commands of docs/hosted.md for a machine of one's own, typed as they are in the page. The build of the
//! kernel takes half an hour, so the lab's kernel stands in for it, and its image for the disk.

use mercury_lab::pages;

use super::*;

const ESCAPE: &str = "\u{1}x";

/// Returns a folder with the page's files: vmlinux with its records, root.img and root.cpio.
fn folder() -> Result<(Place, PathBuf)> {
    let built = previrtualization::build(Release::Bookworm, Flavour::PreVirtualized)?;
    let place = Place::with("page", &built)?;
    let image = Image::ensure(Release::Bookworm)?;
    place.root_disk(&image)?;
    place.file("root.cpio", &archive(&image.tree(), "#!/bin/sh\necho up: $(uname -r)\nread word\n"));
    fs::set_permissions(&place.directory, fs::Permissions::from_mode(0o777)).expect("its rights");
    Ok((place, built.afterburner))
}

/// Types a command at a terminal in the folder, as the user nobody.
fn types(place: &Place, line: &str) -> Machine {
    println!("$ {line}");
    let line = format!("PATH=$PWD:$PATH; cd {}; {line}", place.directory.display());
    let mut command = as_nobody(Path::new("script"));
    Machine::start(place, command.args(["-qec", &line, "/dev/null"]).current_dir(&place.directory))
}

/// Leaves a machine by Ctrl-A x, after its console has shown `text`.
fn shows(mut machine: Machine, text: &str) {
    machine.wait_for(text);
    machine.type_line(ESCAPE);
    assert_well(&machine.end(HALTED));
}

/// Returns the one command that has all these words.
fn with<'a>(lines: &'a [String], words: &[&str]) -> &'a str {
    let has = |line: &&String| words.iter().all(|word| line.contains(word));
    lines.iter().find(has).unwrap_or_else(|| panic!("{words:?} is not in the page: {lines:#?}"))
}

#[test]
#[ignore = "long"]
fn the_page_s_machines_start_as_they_are_typed() -> Result<()> {
    let (place, afterburner) = folder()?;
    let lines = pages::commands("hosted.md", "# How to")?.concat();
    let verify = with(&lines, &["afterburner verify vmlinux"]).replacen("afterburner", "$AFTERBURNER", 1);
    let verified = Command::new("sh")
        .args(["-ec", &verify])
        .env("AFTERBURNER", &afterburner)
        .current_dir(&place.directory)
        .status();
    assert!(verified.expect("the afterburner").success(), "{verify}");
    let check = types(&place, with(&lines, &["hosted run", "--check"])).end(HALTED);
    println!("{check}");
    shows(types(&place, with(&lines, &["--initramfs root.cpio"])), "up: 6.1");
    shows(types(&place, with(&lines, &["--disk root.img", "init=/bin/bash"])), "Run /bin/bash as init");
    shows(types(&place, with(&lines, &["root.img,private"])), "as init process");
    if host::find_program("passt").is_some() {
        shows(types(&place, with(&lines, &["--net passt", "--forward"])), "as init process");
    }
    let mut debugged = types(&place, with(&lines, &["--gdb machine.gdb"]));
    debugged.wait_for("as init process");
    let kernel = "x/s (char*)&linux_banner";
    let gdb = format!("{} -- -batch -ex '{kernel}' -ex detach", with(&lines, &["hosted gdb"]));
    let said = types(&place, &gdb).end(Some(0));
    assert!(said.contains("Linux version 6.1") && said.contains("detached"), "{said}");
    shows(debugged, "Linux version");
    Ok(())
}
