# Installs the command `stolon` for one user of Windows.
#
#     $env:STOLON_DOWNLOADS = "https://..."; $env:STOLON_VERSION = "0.1.0"; .\install.ps1
#
# STOLON_DOWNLOADS is the folder of the release's archives. STOLON_INSTALL_DIR is the folder of the
# program. The archive's checksum is verified before anything is installed.
$ErrorActionPreference = "Stop"

$downloads = $env:STOLON_DOWNLOADS
$version = $env:STOLON_VERSION
if (-not $downloads) { throw "STOLON_DOWNLOADS: expected the URL of the folder with the archives" }
if (-not $version) { throw "STOLON_VERSION: expected a version, for example 0.1.0" }
if ($env:PROCESSOR_ARCHITECTURE -ne "AMD64") {
    throw "there is no archive for $env:PROCESSOR_ARCHITECTURE; build from source instead"
}
$directory = $env:STOLON_INSTALL_DIR
if (-not $directory) { $directory = Join-Path $env:LOCALAPPDATA "Programs\stolon" }

$name = "stolon-$version-x86_64-pc-windows-gnu"
$work = Join-Path ([IO.Path]::GetTempPath()) ([Guid]::NewGuid())
New-Item -ItemType Directory -Path $work | Out-Null
try {
    $archive = Join-Path $work "$name.zip"
    Invoke-WebRequest -UseBasicParsing -Uri "$downloads/$name.zip" -OutFile $archive
    Invoke-WebRequest -UseBasicParsing -Uri "$downloads/$name.zip.sha256" -OutFile "$archive.sha256"
    $expected = (Get-Content "$archive.sha256").Split(" ")[0]
    $got = (Get-FileHash -Algorithm SHA256 $archive).Hash
    if ($got -ne $expected) { throw "the checksum is wrong; nothing was installed" }
    Expand-Archive -Path $archive -DestinationPath $work
    New-Item -ItemType Directory -Force -Path $directory | Out-Null
    Copy-Item -Force (Join-Path $work "$name\stolon.exe") $directory
} finally {
    Remove-Item -Recurse -Force $work
}

$path = [Environment]::GetEnvironmentVariable("Path", "User")
if (-not ($path -split ";" -contains $directory)) {
    [Environment]::SetEnvironmentVariable("Path", "$directory;$path", "User")
    Write-Output "$directory was added to Path; open a new terminal"
}
Write-Output "installed $(& (Join-Path $directory 'stolon.exe') --version); try: stolon demo"
