// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>

#include "storage/s3/credentials.h"

namespace ropeteam::storage::s3 {
namespace {

constexpr size_t kFileBytesMax = 1 << 20;  // of ~/.aws/config: enough for a thousand profiles

std::string_view Trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

struct FileCloser {
  void operator()(FILE* file) const { std::fclose(file); }
};

// Returns an empty text if the file does not exist.
Result<std::string> ReadShared(const std::string& path) {
  const std::unique_ptr<FILE, FileCloser> file(std::fopen(path.c_str(), "re"));
  if (file == nullptr) {
    if (errno == ENOENT || errno == ENOTDIR) return std::string();
    return Error(Code::kInvalidArgument, "%s",
                 ErrnoError(errno, "cannot read %s", path.c_str()).message().c_str());
  }
  std::string text(kFileBytesMax + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0)
    return Error(Code::kInvalidArgument, "%s is not a file that can be read", path.c_str());
  if (text.size() > kFileBytesMax)
    return Error(Code::kInvalidArgument, "%s is larger than %zu bytes", path.c_str(), kFileBytesMax);
  return text;
}

std::string SectionName(std::string_view header) {
  constexpr std::string_view kProfile = "profile";
  if (header.starts_with(kProfile) && header.size() > kProfile.size() &&
      (header[kProfile.size()] == ' ' || header[kProfile.size()] == '\t'))
    header = Trim(header.substr(kProfile.size()));
  if (header.size() >= 2 && header.front() == '"' && header.back() == '"')
    header = header.substr(1, header.size() - 2);
  return std::string(header);
}

std::string SharedFile(const Environment& environment, const char* variable, const char* name) {
  if (const auto path = environment.NonEmpty(variable)) return *path;
  const auto home = environment.NonEmpty("HOME");
  return home ? *home + "/.aws/" + name : std::string();
}

}  // namespace

Result<Profiles> ParseProfiles(const std::string& text, const std::string& file) {
  Profiles profiles;
  std::map<std::string, std::string>* section = nullptr;
  int number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line(text.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    const std::string_view content = Trim(line);
    if (content.empty() || content[0] == '#' || content[0] == ';') continue;
    if (content[0] == '[') {
      const size_t close = content.find(']');
      if (close == std::string_view::npos)
        return Error(Code::kInvalidArgument, "%s line %d: a section without its ]", file.c_str(), number);
      section = &profiles[SectionName(Trim(content.substr(1, close - 1)))];
      continue;
    }
    if (line[0] == ' ' || line[0] == '\t') continue;  // a nested setting, as under "s3 ="
    const size_t equals = content.find('=');
    if (equals == std::string_view::npos || section == nullptr)
      return Error(Code::kInvalidArgument, "%s line %d is neither [section] nor name = value", file.c_str(),
                   number);
    std::string name(Trim(content.substr(0, equals)));
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    (*section)[name] = Trim(content.substr(equals + 1));
  }
  return profiles;
}

const std::string& Profile::setting(const std::string& key) const {
  static const std::string kNone;
  const auto found = settings.find(key);
  return found == settings.end() ? kNone : found->second;
}

Result<Profile> LoadProfile(const Environment& environment, const std::string& wanted) {
  Profile profile;
  const auto variable = environment.NonEmpty("AWS_PROFILE");
  profile.named = !wanted.empty() || variable;
  profile.name = !wanted.empty() ? wanted : variable.value_or("default");
  profile.credentials_file = SharedFile(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials");
  profile.config_file = SharedFile(environment, "AWS_CONFIG_FILE", "config");
  bool found = false;
  for (const std::string& file : {profile.credentials_file, profile.config_file}) {
    if (file.empty()) continue;
    const Result<std::string> text = ReadShared(file);
    if (!text.ok()) return text.status();
    Result<Profiles> profiles = ParseProfiles(*text, file);
    if (!profiles.ok()) return profiles.status();
    const auto section = profiles->find(profile.name);
    if (section == profiles->end()) continue;
    found = true;
    profile.settings.insert(section->second.begin(), section->second.end());
  }
  if (profile.named && !found)
    return Error(Code::kInvalidArgument, "the profile %s (of %s) is neither in %s nor in %s",
                 profile.name.c_str(), wanted.empty() ? "AWS_PROFILE" : "the URL",
                 profile.credentials_file.c_str(), profile.config_file.c_str());
  return profile;
}

}  // namespace ropeteam::storage::s3
