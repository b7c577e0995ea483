// SPDX-License-Identifier: Apache-2.0
#include "storage/url.h"

#include <cctype>
#include <charconv>
#include <string_view>

namespace ropeteam::storage {
namespace {

bool PercentDecode(std::string_view text, std::string* decoded) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded->push_back(text[i]);
      continue;
    }
    unsigned value = 0;
    if (text.size() - i < 3) return false;
    const auto [end, error] = std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16);
    if (error != std::errc() || end != text.data() + i + 3) return false;
    decoded->push_back(static_cast<char>(value));
    i += 2;
  }
  return true;
}

Status ParseParameters(const std::string& text, std::string_view query, Url* url) {
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    const std::string name(pair.substr(0, equals));
    std::string value;
    if (equals == std::string_view::npos || name.empty() || !PercentDecode(pair.substr(equals + 1), &value))
      return Error(Code::kInvalidArgument, "storage URL %s: the parameter %s is not name=value", text.c_str(),
                   std::string(pair).c_str());
    if (!url->parameters.emplace(name, std::move(value)).second)
      return Error(Code::kInvalidArgument, "storage URL %s has the parameter %s twice", text.c_str(),
                   name.c_str());
  }
  return OkStatus();
}

}  // namespace

Result<Url> ParseUrl(const std::string& text) {
  Url url;
  if (text.starts_with('/')) {
    url.scheme = "file";
    url.path = text;
    return url;
  }
  const size_t colon = text.find("://");
  if (colon == std::string::npos || colon == 0)
    return Error(Code::kInvalidArgument, "storage URL %s: neither an absolute path nor scheme://…",
                 text.c_str());
  for (const char c : text.substr(0, colon))
    url.scheme.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  std::string_view rest = std::string_view(text).substr(colon + 3);
  const size_t question = rest.find('?');
  if (question != std::string_view::npos) {
    ROPETEAM_RETURN_IF_ERROR(ParseParameters(text, rest.substr(question + 1), &url));
    rest = rest.substr(0, question);
  }
  const size_t slash = rest.find('/');
  url.authority = rest.substr(0, slash);
  std::string_view path = slash == std::string_view::npos ? std::string_view() : rest.substr(slash);
  if (url.scheme != "file") {
    while (path.starts_with('/')) path.remove_prefix(1);
    while (path.ends_with('/')) path.remove_suffix(1);
  }
  url.path = path;
  return url;
}

}  // namespace ropeteam::storage
